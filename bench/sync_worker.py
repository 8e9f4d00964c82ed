"""One inference worker of `bench_sync`, in a process of its own: its syncs and its baseline.

Both scatter with the code that vLLM's workers scatter with, on one thread beside the progress
thread, into parameters in this process's memory.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from multiprocessing.connection import Connection

import torch

from bench.bulk_reads import SECONDS, BulkReads, bulk_buffer
from bench.parallel_model import NUM_WORKERS, Model
from bench.thread_time import cpu_seconds
from rdt_bake import apply_placement
from rdt_plan import Chunk, ConsumerId, SyncPlan, build_plan
from rdt_transport import Consumer, HostEvents, JobSettings, ProgressThread, RendezvousClient
from rdt_transport.rendezvous import RendezvousAddress
from rdt_transport.testing.counted_wire import CountedWire
from rdt_transport.wire.base import PeerAddress, Region, Wire
from rdt_transport.wire.nixl import NixlWire

__all__ = ["plan_of", "serve_worker"]


def plan_of(model: Model, worker: int, settings: JobSettings) -> SyncPlan:
    """What worker ``worker`` pulls."""
    return build_plan(
        model.manifest(),
        model.writes(worker),
        ConsumerId(replica=0, worker=worker),
        num_workers=NUM_WORKERS,
        num_slots=settings.num_slots,
        max_chunk_bytes=settings.chunk_bytes,
    )


class Scatterer:
    """A thread that runs what it is given, in order."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="scatter", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(SECONDS)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class _Worker:
    """What the parent can ask for, method by method."""

    def __init__(
        self,
        undo: ExitStack,
        address: RendezvousAddress,
        model: Model,
        worker: int,
        settings: JobSettings,
        counted: bool = False,
    ) -> None:
        self._undo, self._model, self._worker = undo, model, worker
        self._plan = plan_of(model, worker, settings)
        self._parameters = model.parameters()
        self._events = HostEvents()
        self._scatterer = Scatterer()
        undo.callback(self._scatterer.close)
        name = f"consumer{worker}"
        self._counts: CountedWire | None = None

        def make_wire() -> Wire:
            if not counted:
                return NixlWire(name)
            self._counts = CountedWire(NixlWire(name))
            return self._counts

        self._progress = ProgressThread(make_wire, name="progress")
        undo.callback(self._progress.close)
        self._client = RendezvousClient(
            address, on_event=lambda event: self._consumer.on_event(event)
        )
        undo.callback(self._client.close)
        self._client.job(SECONDS)
        self._consumer = Consumer(
            self._progress,
            self._client,
            plan=self._plan,
            num_workers=NUM_WORKERS,
            on_chunk=self._land,
        )
        undo.callback(self._consumer.close)
        self._consumer.attach(SECONDS)

    def num_chunks(self) -> int:
        return len(self._plan.chunks)

    def num_messages(self) -> int:
        """Doorbells and messages of the rendezvous so far, both ways; heartbeats do not count."""
        assert self._counts is not None, "this worker counts nothing"
        return self._client.num_messages + self._counts.num_sent + self._counts.num_received

    def cpu_seconds(self) -> dict[str, float]:
        return cpu_seconds()

    def sync(self, epoch: int) -> dict[str, float]:
        """One epoch, from its record to its commit; the stages' seconds."""
        self._consumer.start(self._client.epoch_record(SECONDS, epoch))
        stats = self._consumer.wait(SECONDS)
        self._consumer.commit(SECONDS)
        return stats.stage_seconds

    def _land(self, chunk: Chunk, packed: torch.Tensor) -> None:
        """On the progress thread: only queue."""
        self._scatterer.put(lambda: self._scatter(chunk, packed))

    def _scatter(self, chunk: Chunk, packed: torch.Tensor) -> None:
        try:
            self._place(chunk, packed)
        except Exception as error:
            self._consumer.scatter_failed(chunk.index, error)
        else:
            self._consumer.scattered(chunk.index, self._events.record())

    def _place(self, chunk: Chunk, packed: torch.Tensor) -> None:
        offsets = dict(zip(chunk.serve.slices, chunk.serve.offsets, strict=True))
        for placement in chunk.placements:
            start = offsets[placement.slice]
            source = packed[start : start + placement.slice.num_bytes]
            apply_placement(placement, source, self._parameters[placement.module, placement.param])

    # ---- the baseline: everything in one read, then scattered ----------------------------------

    def prepare_baseline(self, peer: PeerAddress, remote: Region, plain_pages: bool) -> None:
        """Meet the producer's packed buffer with a buffer as large, and one prepared read."""
        self._packed = bulk_buffer(remote.num_bytes, plain_pages)
        self._bulk = BulkReads(self._progress)
        local = Region(self._packed.data_ptr(), remote.num_bytes)

        def prepare(wire: Wire) -> None:
            wire.register([self._packed])
            wire.connect(peer, SECONDS)  # again: it has registered more by now
            self._handle = handle = wire.prepare_read(peer.name, [(local, remote)])
            self._progress.own(handle, self._bulk)

        self._progress.call(prepare, SECONDS)
        self._undo.callback(
            lambda: self._progress.call(lambda wire: wire.release(self._handle), SECONDS)
        )

    def baseline(self) -> dict[str, float]:
        """Read all packed bytes at once, then scatter them; the stages' seconds."""
        began = time.perf_counter()
        with self._bulk.busy():
            self._progress.submit(lambda wire: wire.post(self._handle, b"read"))
            self._bulk.wait()
        read = time.perf_counter()
        placed: Future[None] = Future()
        self._scatterer.put(lambda: self._place_all(placed))
        placed.result(SECONDS)
        ended = time.perf_counter()
        return {"read": read - began, "scatter": ended - read, "total": ended - began}

    def _place_all(self, placed: Future[None]) -> None:
        start = 0
        try:
            for chunk in self._plan.chunks:
                self._place(chunk, self._packed[start : start + chunk.serve.num_bytes])
                start += chunk.serve.num_bytes
        except Exception as error:
            placed.set_exception(error)
        else:
            placed.set_result(None)

    def clear(self) -> None:
        """Forget what arrived."""
        for tensor in self._parameters.values():
            tensor.zero_()

    def num_wrong(self) -> tuple[int, int]:
        return self._model.num_wrong(self._worker, self._parameters)


def serve_worker(connection: Connection) -> None:
    """Answer the parent's (method, arguments) until it sends None; errors are answers too.

    ``open`` makes a worker, which answers everything else until ``close``.
    """
    torch.set_num_threads(1)  # three busy processes share two cores
    with ExitStack() as undo:
        worker: _Worker | None = None
        while (request := connection.recv()) is not None:
            method, arguments = request
            try:
                match method:
                    case "open":
                        worker = _Worker(undo, *arguments)
                        answer = None
                    case "close":
                        answer = undo.close()
                    case _:
                        answer = getattr(worker, method)(*arguments)
            except Exception as error:
                answer = error
            connection.send(answer)
