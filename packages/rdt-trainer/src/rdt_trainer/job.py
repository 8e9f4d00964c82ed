"""What one trainer rank holds open for its job, opened and closed in order."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rdt_plan import Manifest
from rdt_trainer.client import Client, declared_workers
from rdt_trainer.control import Control
from rdt_trainer.errors import ClientError
from rdt_trainer.hosting import Hosting
from rdt_transport.errors import DisagreementError
from rdt_transport.producer import Producer
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import JobSettings, RendezvousClient, RendezvousEvent
from rdt_transport.wire.base import Wire

__all__ = ["Job"]

_logger = logging.getLogger(__name__)

AGREED_SETTINGS = ("num_producers", "num_replicas", "num_slots", "max_chunk_bytes", "lookahead")

DETACH_TIMEOUT_SECONDS = 30.0  # a server that hangs must not keep a trainer from ending


class Job:
    """Opens on construction; whatever was opened is closed again where that fails.

    Args:
        hosting: where the rendezvous is, or is to be.
        rank: this trainer rank.
        manifest: what its source declared.
        settings: the job's.
        clients: by replica; empty on ranks other than 0.
        device: where the serve slots live.
        make_wire: makes the wire, on the thread that owns it.
        on_event: called with each push of the rendezvous, before the producer sees it.
        timeout_seconds: of each single wait.

    Attributes:
        control: drives the servers; None where there are no clients.
    """

    def __init__(
        self,
        hosting: Hosting,
        *,
        rank: int,
        manifest: Manifest,
        settings: JobSettings,
        clients: Sequence[Client],
        device: torch.device | str,
        make_wire: Callable[[], Wire],
        on_event: Callable[[RendezvousEvent], None],
        timeout_seconds: float,
    ) -> None:
        self.manifest = manifest
        self.control: Control | None = None
        self._hosting = hosting
        self._rank = rank
        self._settings = settings
        self._clients = clients
        self._timeout_seconds = timeout_seconds
        self._closers: list[Callable[[], list[str] | None]] = []
        late: list[Producer] = []

        def dispatch(event: RendezvousEvent) -> None:
            on_event(event)
            for producer in late:
                producer.on_event(event)

        try:
            self._closers.append(hosting.close)
            address = hosting.open()
            progress = ProgressThread(make_wire, name=f"rdt-producer-{rank}")
            self._closers.append(progress.close)
            self.rendezvous = RendezvousClient(address, on_event=dispatch)
            self._closers += [self.rendezvous.close, self.rendezvous.leave]
            self.producer = Producer(
                progress,
                self.rendezvous,
                rank=rank,
                manifest=manifest,
                settings=settings,
                device=device,
            )
            late.append(self.producer)
            self._closers.append(self.producer.close)
            self.producer.open(timeout_seconds)
            self._check_settings()
            if clients:
                self.control = control = Control(clients)
                self._closers.append(lambda: control.close(DETACH_TIMEOUT_SECONDS))
                self._attach(control, range(len(clients)))
        except BaseException:
            self.close()
            raise

    def attach(self, replica: int) -> None:
        """Attach one replica again; its client is in no call. Raises `ClientError`."""
        assert self.control is not None, "a replica has a client, and clients have a control"
        self._attach(self.control, [replica])

    def close(self) -> None:
        """Workers first, then what they read from, then where they met; problems are logged."""
        while self._closers:
            try:
                problems = self._closers.pop()() or []
            except Exception as error:
                problems = [f"{type(error).__name__}: {error}"]
            for problem in problems:
                _logger.warning("rank %d, while closing: %s", self._rank, problem)

    def _check_settings(self) -> None:
        """The rules that keep ranks from waiting for each other hold for equal settings only."""
        job = self.rendezvous.job(self._timeout_seconds)
        for field in AGREED_SETTINGS:
            ours, theirs = getattr(self._settings, field), getattr(job, field)
            if ours != theirs:
                raise DisagreementError(
                    f"trainer rank {self._rank}: JobSettings.{field} is {ours} here, and {theirs} "
                    f"in the job {job.job} that the rendezvous hosts: expected equal settings; "
                    "give every RdtTrainer the settings= that the rendezvous was hosted with"
                )

    def _attach(self, control: Control, replicas: Sequence[int]) -> None:
        control.init({each: self._init_info(each) for each in replicas}, self._timeout_seconds)
        self._check_attached()

    def _init_info(self, replica: int) -> dict[str, Any]:
        return {
            **self._hosting.address.init_info(),
            "replica": replica,
            "num_replicas": self._settings.num_replicas,
            "num_workers": declared_workers(self._clients[replica]),
            "timeout_seconds": self._timeout_seconds,
        }

    def _check_attached(self) -> None:
        """Every server said that it is initialised: all its workers must have subscribed."""
        subscriptions = self.rendezvous.subscriptions(self._timeout_seconds)
        for replica, client in enumerate(self._clients):
            mine = [each for each in subscriptions if each.consumer.replica == replica]
            said = mine[0].num_workers if mine else 0
            expected = declared_workers(client) or said
            if len(mine) < max(expected, 1):
                raise ClientError(
                    f"{client.name}: replica {replica} has {len(mine)} workers attached, expected "
                    f"{expected or 'at least 1'}; start the server with "
                    '--weight-transfer-config \'{"backend": "rdt"}\', and check num_workers if it '
                    "was given",
                    server_text="",
                )
