"""The work of `rdt-push`: attach, plan, perhaps checksum, push, detach."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rdt_plan import Subscription
from rdt_trainer.client import Client, PauseMode
from rdt_trainer.engine import RdtTrainer
from rdt_trainer.errors import RdtTrainerError, SyncFailedError
from rdt_trainer.push.meter import Meter, MeteredWire
from rdt_trainer.push.outcome import PushOutcome, ServerOutcome, reads_of
from rdt_trainer.push.server import PushedServer, recover_all
from rdt_trainer.push.verifying import checksums_by_replica
from rdt_trainer.push.wording import plain
from rdt_trainer.safetensors_source import SafetensorsSource
from rdt_transport.errors import RdtTransportError
from rdt_transport.rendezvous import RendezvousClient

__all__ = ["PushOptions", "Stage", "push"]


class Stage(Enum):
    """What a push is at."""

    REACH = "reaching the servers"
    ATTACH = "recording and planning on the servers"
    CHECKSUM = "checksums of the checkpoint"
    PAUSE = "pausing the servers"
    PUSH = "pushing"


RECOVERY_SECONDS = 20.0  # that servers have to resume, all at once

OnProgress = Callable[[Stage, Callable[[], int], int], None]
"""Told as each stage begins: how many bytes are done, to be asked at any time, of how many."""


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How to push.

    Attributes:
        weight_version: what the servers report from then on.
        pause_mode: what becomes of requests in flight: "wait" lets them end, "abort" ends them.
        dry_run: attach and plan, and detach again; no server pauses, no weight moves.
        verify: have every worker compare what it got with the checkpoint, before it serves it.
        host: an address of this machine that every worker reaches.
        staged: have all weights pass through slots.
        device: where weights are read from: "cpu", the mapped files; "cuda", copies on this
            machine's GPU, a gather group at a time, for workers that read nothing else fast.
        unconsumed: patterns (as a shell's) of tensors that no worker needs to read.
        timeout_seconds: of each single wait; a server must be paused and pulling in half of it.
    """

    weight_version: str
    pause_mode: PauseMode = "wait"
    dry_run: bool = False
    verify: bool = False
    host: str = "127.0.0.1"
    staged: bool = False
    device: str = "cpu"
    unconsumed: Sequence[str] = ()
    timeout_seconds: float = 600.0


def push(
    checkpoint: Path,
    clients: Sequence[Client],
    options: PushOptions,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> PushOutcome:
    """Push ``checkpoint`` into the servers of ``clients``, which stay the caller's to close.

    A server that fails while it is pushed to is left out, and the outcome tells. Whatever goes
    wrong before that is raised: nothing was changed, and the error's notes name servers that were
    paused before. An interrupt is raised too, at any time: whom this push has paused, and not
    touched, is told to resume first, and the error's notes say of each server what became of it.

    Raises:
        SourceError, ManifestError: the checkpoint is not whole, or holds what no worker reads.
        ClientError: a server cannot be reached, or refuses.
        RdtTransportError: the rendezvous, or the wire.
    """
    source = SafetensorsSource(checkpoint, device=options.device, stable=not options.staged)
    meter = Meter()
    steps = _Steps(on_progress, meter, len(clients))
    servers = [
        PushedServer(each, options.pause_mode, source.check_unchanged, steps.note)
        for each in clients
    ]
    subscriptions: Sequence[Subscription] = ()
    failures: dict[int, str] = {}
    seconds = 0.0
    on_progress(Stage.REACH, lambda: 0, 0)

    def fates() -> tuple[ServerOutcome, ...]:
        return tuple(
            ServerOutcome(
                each.name,
                reads_of(subscriptions, at),
                failures.get(at),
                each.is_paused,
                each.weights,
                each.was_paused,
                each.is_pausing,
            )
            for at, each in enumerate(servers)
        )

    try:
        with RdtTrainer(
            source,
            servers,
            host=options.host,
            device=options.device,
            unconsumed=options.unconsumed,
            timeout_seconds=options.timeout_seconds,
            make_wire=lambda: MeteredWire("push", meter),
        ) as trainer:
            trainer.init()
            with RendezvousClient(trainer.address) as observer:
                subscriptions = observer.subscriptions(options.timeout_seconds)
            if not options.dry_run:
                if options.verify:
                    _expect_checksums(servers, subscriptions, source, on_progress)
                meter.expect(subscriptions)
                on_progress(Stage.PAUSE, lambda: 0, 0)
                started = time.perf_counter()
                failures = _send(trainer, servers, options.weight_version)
                seconds = time.perf_counter() - started
    except BaseException as error:
        for each in fates():
            if each.is_paused or each.is_pausing or isinstance(error, KeyboardInterrupt):
                error.add_note(each.state)
        raise
    return PushOutcome(
        checkpoint=str(checkpoint),
        num_tensors=len(source.metadata),
        num_bytes=source.num_bytes,
        weight_version=options.weight_version,
        is_dry_run=options.dry_run,
        is_verified=options.verify and not options.dry_run,
        seconds=seconds,
        servers=fates(),
    )


class _Steps:
    """Tells the stages that begin when all servers have taken a step; any thread."""

    def __init__(self, on_progress: OnProgress, meter: Meter, num_servers: int) -> None:
        self._on_progress = on_progress
        self._meter = meter
        self._num_servers = num_servers
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, step: str) -> None:
        """One server has taken it."""
        with self._lock:
            self._taken[step] += 1
            if self._taken[step] != self._num_servers:
                return
            if step == "reached":
                self._on_progress(Stage.ATTACH, lambda: 0, 0)
            else:
                meter = self._meter
                self._on_progress(Stage.PUSH, lambda: meter.bytes_read, meter.total_bytes)


def _expect_checksums(
    servers: Sequence[PushedServer],
    subscriptions: Sequence[Subscription],
    source: SafetensorsSource,
    on_progress: OnProgress,
) -> None:
    done = [0]

    def on_bytes(num_bytes: int) -> None:
        done[0] += num_bytes

    on_progress(Stage.CHECKSUM, lambda: done[0], _distinct_bytes(subscriptions))
    for replica, checksums in checksums_by_replica(subscriptions, source.tensor, on_bytes).items():
        servers[replica].checksums = checksums


def _distinct_bytes(subscriptions: Iterable[Subscription]) -> int:
    """Of what workers read, what equal plans share counted once."""
    tables = {(t.plan_digest, t.owner): t for each in subscriptions for t in each.tables}
    return sum(chunk.num_bytes for table in tables.values() for chunk in table.chunks)


def _send(
    trainer: RdtTrainer, servers: Sequence[PushedServer], weight_version: str
) -> dict[int, str]:
    """Push once; who failed, and why. Whose weights were not touched serves on, however it ends."""
    try:
        dropped = trainer.send_weights(weight_version).dropped
        return {replica: plain(reason) for replica, reason in dropped.items()}
    except (RdtTrainerError, RdtTransportError) as error:
        reason = error.reason if isinstance(error, SyncFailedError) else str(error)
        return dict.fromkeys(range(len(servers)), plain(reason))
    finally:
        recover_all(servers, RECOVERY_SECONDS)
