"""What one trainer rank holds open for its job, opened and closed in order."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rdt_plan import Manifest
from rdt_trainer.client import Client, declared_workers
from rdt_trainer.control import LAST_WORDS_SECONDS, START_WITH_RDT, Control
from rdt_trainer.errors import ClientError, TrainerStateError
from rdt_trainer.hosting import Hosting
from rdt_trainer.unconsumed import check_consumed
from rdt_transport.errors import DisagreementError
from rdt_transport.producer import Producer
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import (
    JobSettings,
    RendezvousEvent,
)
from rdt_transport.wire.base import Wire
from rdt_transport.wire.choice import WireChoice

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
        clients: of the replicas that the job starts with; empty on ranks other than 0.
        device: where the serve slots and the source's tensors live.
        stable: of these, those that stay where they are, by name.
        unconsumed: patterns of names that no worker needs to read.
        wire: which one the workers are to use.
        make_wire: makes ours, on the thread that owns it.
        on_event: called with each push of the rendezvous, before the producer sees it.
        timeout_seconds: of each single wait.

    Attributes:
        num_bytes: what this rank sends.
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
        device: torch.device,
        stable: Mapping[str, torch.Tensor],
        unconsumed: Sequence[str],
        wire: WireChoice,
        make_wire: Callable[[], Wire],
        on_event: Callable[[RendezvousEvent], None],
        timeout_seconds: float,
    ) -> None:
        self.manifest = manifest
        held = (param.held_by(rank) for param in manifest.params)
        self.num_bytes = sum(each.num_bytes for each in held if each is not None)
        self.device = device
        self.control: Control | None = None
        self._hosting = hosting
        self._rank = rank
        self._settings = settings
        self._clients = dict(enumerate(clients))  # by replica; numbers are given once
        self._next_replica = len(clients)
        self._unconsumed = tuple(unconsumed)
        self._wire = wire
        self._timeout_seconds = timeout_seconds
        self._num_workers: dict[int, int] = {}  # of each replica, when it was attached last
        self._closers: list[Callable[[], list[str] | None]] = []
        late: list[Producer] = []

        def dispatch(event: RendezvousEvent) -> None:
            on_event(event)
            for producer in late:
                producer.on_event(event)

        try:
            self._closers.append(hosting.close)
            hosting.open(device.type)
            progress = ProgressThread(make_wire, name=f"rdt-producer-{rank}", device=device)
            self._closers.append(progress.close)
            self.rendezvous = hosting.connect(dispatch)
            self._closers += [self.rendezvous.close, self.rendezvous.leave]
            self.producer = Producer(
                progress,
                self.rendezvous,
                rank=rank,
                manifest=manifest,
                settings=settings,
                device=device,
                sources=stable,
            )
            late.append(self.producer)
            self._closers.append(self.producer.close)
            self.producer.open(timeout_seconds)
            self._check_settings()
            if clients:
                self.control = control = Control(clients)
                self._closers.append(lambda: control.close(DETACH_TIMEOUT_SECONDS))
                self.rendezvous.set_replicas(self._clients)
                self._attach(control, self.replicas)
                self._check_consumed()
        except BaseException:
            self.close()
            raise

    @property
    def replicas(self) -> tuple[int, ...]:
        """The numbers of the job's replicas, attached or not, on rank 0; empty on others."""
        return tuple(self._clients)

    @property
    def clients(self) -> tuple[Client, ...]:
        """Those of the replicas, in this order."""
        return tuple(self._clients.values())

    def add_replica(self, client: Client) -> int:
        """Attach one more replica; it takes part from the next epoch on. Returns its number.

        Raises as `attach` does; the job is then as it was, and the client detached.
        """
        assert self.control is not None, "who adds replicas drives them"
        replica = self._next_replica
        self._next_replica += 1
        self._clients[replica] = client
        self.control.add(replica, client)
        try:
            self.rendezvous.set_replicas(self.replicas)
            self._attach(self.control, [replica])
        except BaseException:
            self.remove_replica(replica)
            raise
        return replica

    def remove_replica(self, replica: int) -> None:
        """Detach one replica; none of the epochs to come is its. What its server does is logged."""
        assert self.control is not None, "who removes replicas drives them"
        for problem in self.control.remove(replica, DETACH_TIMEOUT_SECONDS):
            _logger.warning("while replica %d is removed: %s", replica, problem)
        del self._clients[replica]
        self._num_workers.pop(replica, None)
        self.rendezvous.set_replicas(self.replicas)

    def attach(self, replica: int) -> None:
        """Attach one replica again.

        Raises `ClientError`, and `TrainerStateError` while its client is in an earlier call.
        """
        assert self.control is not None, "a replica has a client, and clients have a control"
        if not self.control.wait(self._timeout_seconds, [replica]):
            raise self._still_busy(self.control)
        self._attach(self.control, [replica])

    def restore(self) -> None:
        """Attach again, each for itself, the replicas that fell; who stays away is logged.

        A client is in one call at a time, so a replica whose server is still in an earlier call is
        dropped, or stays so; another is waited for where nobody else is left.

        Raises `ClientError` or `TrainerStateError` when no replica is there.
        """
        if (control := self.control) is None:
            return
        missing = self._missing()
        present = [each for each in self.replicas if each not in missing]
        control.wait(self._timeout_seconds, present or missing)
        if present and missing:
            control.wait(LAST_WORDS_SECONDS, missing)
        if late := [each for each in present if control.is_busy(each)]:
            self._drop(late, "its server is still in an earlier call")
            present = [each for each in present if each not in late]
        idle = [each for each in missing if not control.is_busy(each)]
        infos = {each: self._init_info(each) for each in idle}
        errors = control.init_each(infos, self._timeout_seconds) if infos else {}
        errors |= self._check_attached([each for each in idle if each not in errors])
        for replica, error in sorted(errors.items()):
            _logger.warning("replica %d could not be attached again: %s", replica, error)
        if not present and len(errors) == len(idle):
            raise next(iter(errors.values()), None) or self._still_busy(control)

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
            if ours not in (None, theirs):
                raise DisagreementError(
                    f"trainer rank {self._rank}: JobSettings.{field} is {ours} here, and {theirs} "
                    f"in the job {job.job} that the rendezvous hosts: expected equal settings; "
                    "give every RdtTrainer the settings= that the rendezvous was hosted with"
                )

    def _attach(self, control: Control, replicas: Sequence[int]) -> None:
        control.init({each: self._init_info(each) for each in replicas}, self._timeout_seconds)
        for error in self._check_attached(replicas).values():
            raise error

    def _check_consumed(self) -> None:
        """All replicas are here, now if ever: a replica alone may read less than the others."""
        # Over a connection without a role: a producer's shows the tables of its own rank only.
        with self._hosting.connect() as observer:
            subscriptions = observer.iter_subscriptions(self._timeout_seconds)
            check_consumed(self.manifest, subscriptions, self._unconsumed)

    def _init_info(self, replica: int) -> dict[str, Any]:
        return {
            **self._hosting.address.init_info(),
            "replica": replica,
            "num_replicas": self._next_replica,
            "num_workers": declared_workers(self._clients[replica]),
            "timeout_seconds": self._timeout_seconds,
            **({"unconsumed": list(self._unconsumed)} if self._unconsumed else {}),
            **self._wire.init_info(),
        }

    def _check_attached(self, replicas: Iterable[int]) -> dict[int, BaseException]:
        """Their servers said that they are initialised: who lacks workers all the same, and why."""
        numbers: dict[int, list[int]] = {each: [] for each in replicas}
        if numbers:
            for each in self.rendezvous.iter_subscriptions(self._timeout_seconds):
                if each.consumer.replica in numbers:
                    numbers[each.consumer.replica].append(each.num_workers)
        errors: dict[int, BaseException] = {}
        for replica, said in numbers.items():
            client = self._clients[replica]
            expected = declared_workers(client) or next(iter(said), 0)
            self._num_workers[replica] = expected or self._num_workers.get(replica, 1)
            if len(said) < max(expected, 1):
                errors[replica] = ClientError(
                    f"{client.name}: replica {replica} has {len(said)} workers attached, expected "
                    f"{expected or 'at least 1'}; {START_WITH_RDT}, and check num_workers if it "
                    "was given",
                    server_text="",
                )
        return errors

    def _missing(self) -> list[int]:
        """The replicas that lack a worker now, not as far as we were told: news may be late."""
        present = Counter(each.replica for each in self.rendezvous.consumers(self._timeout_seconds))
        return [r for r in self.replicas if present[r] < self._num_workers.get(r, 1)]

    def _drop(self, replicas: Sequence[int], reason: str) -> None:
        for each in self.rendezvous.iter_subscriptions(self._timeout_seconds):
            if each.consumer.replica in replicas:
                self.rendezvous.drop(each.consumer, each.incarnation, reason)

    def _still_busy(self, control: Control) -> TrainerStateError:
        return TrainerStateError(
            f"{', '.join(control.busy())}: an earlier call has not returned within "
            f"{self._timeout_seconds:g} seconds; close this trainer if it never will"
        )
