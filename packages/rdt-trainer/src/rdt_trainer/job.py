"""What one trainer rank holds open for its job, opened and closed in order."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rdt_plan import Manifest
from rdt_trainer.client import Client
from rdt_trainer.control import Control
from rdt_trainer.errors import ClientError
from rdt_trainer.hosting import Hosting
from rdt_transport.producer import Producer
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import JobSettings, RendezvousClient, RendezvousEvent
from rdt_transport.wire.base import Wire

__all__ = ["Job"]

_logger = logging.getLogger(__name__)

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
            if clients:
                self._attach_all(Control(clients))
        except BaseException:
            self.close()
            raise

    def attach(self, replica: int) -> None:
        """Attach one replica again. Raises `ClientError`."""
        self._clients[replica].init(self._init_info(replica))
        self._check_attached()

    def close(self) -> None:
        """Workers first, then what they read from, then where they met; problems are logged."""
        while self._closers:
            try:
                problems = self._closers.pop()() or []
            except Exception as error:
                problems = [f"{type(error).__name__}: {error}"]
            for problem in problems:
                _logger.warning("rank %d, while closing: %s", self._rank, problem)

    def _attach_all(self, control: Control) -> None:
        self.control = control
        self._closers.append(lambda: control.close(DETACH_TIMEOUT_SECONDS))
        control.init([self._init_info(replica) for replica in range(len(self._clients))])
        self._check_attached()

    def _init_info(self, replica: int) -> dict[str, Any]:
        where = self._hosting.address.init_info()
        return {**where, "replica": replica, "num_replicas": self._settings.num_replicas}

    def _check_attached(self) -> None:
        """Every server said that it is initialised: all its workers must have subscribed."""
        subscriptions = self.rendezvous.subscriptions(self._timeout_seconds)
        for replica, client in enumerate(self._clients):
            mine = [each for each in subscriptions if each.consumer.replica == replica]
            expected = mine[0].num_workers if mine else 1
            if len(mine) < expected:
                raise ClientError(
                    f"{client.name}: replica {replica} has {len(mine)} workers attached, expected "
                    f"{expected if mine else 'at least 1'}; start the server with "
                    '--weight-transfer-config \'{"backend": "rdt"}\'',
                    server_text="",
                )
