"""The worker of one tensor-parallel rank, without an engine: tensors behind a real consumer."""

import queue
import threading
import time
from contextlib import ExitStack
from typing import Any

import torch

from bench.gpu.devices import bound, name_of
from bench.gpu.models import MODELS, fill
from bench.gpu.rank import manifest_of, rank_shapes, rank_writes
from bench.gpu.recorded import chunk_facts, plan_facts, worker_intervals
from bench.stages import ChunkFacts, Interval
from rdt_plan import Chunk, ConsumerId, DirectRule, build_plan
from rdt_transport.agent import posting_threads
from rdt_transport.chunk_copies import scatter_copies
from rdt_transport.consumer import Consumer
from rdt_transport.copies import CopyTable
from rdt_transport.events import events_of
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import RendezvousAddress, RendezvousClient
from rdt_transport.wire.nixl import NixlWire

__all__ = ["RankWorker"]

RANK = 1
SECONDS = 120.0


class RankWorker:
    """Rank 1 of 8, alone: a Ray actor that answers what `bench.gpu.worker.GpuWorker` answers."""

    def __init__(self, kind: str, tiny: bool, device: str) -> None:
        self._model = MODELS[kind].tiny() if tiny else MODELS[kind]
        self._device = bound(device)
        self._events = events_of(self._device)
        self._events.bind()
        self._tensors = {
            spot: torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
            for spot, shape in rank_shapes(self._model).items()
        }
        self._is_direct = True
        self._num_threads = posting_threads(self._device.type)
        self._jobs: queue.SimpleQueue[tuple[Chunk, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._scatter, daemon=True)
        self._tables: dict[int, tuple[CopyTable, list[torch.Tensor]]] = {}
        self._cleanup = ExitStack()
        self._consumer: Consumer | None = None
        self._calls: list[Interval] = []
        self._thread.start()

    def describe(self) -> dict[str, str]:
        """What runs here."""
        device = name_of(self._device)
        return {"engine": "none", "torch": torch.__version__, "device": device}

    def use(self, backend: str, options: dict[str, Any]) -> None:
        """The options of the next attachment."""
        self._is_direct = options.get("direct", True)
        self._num_threads = options.get("read_threads", posting_threads(self._device.type))

    # ---- the calls of a trainer --------------------------------------------------------------

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.shutdown_weight_transfer_engine()
        address = RendezvousAddress.from_init_info(request.init_info)
        late: list[Consumer] = []
        client = RendezvousClient(
            address, on_event=lambda event: late[0].on_event(event) if late else None
        )
        self._cleanup.callback(client.close)
        self._client = client
        progress = ProgressThread(
            lambda: NixlWire("rank", num_threads=self._num_threads),
            name="rank-progress",
            device=self._device,
        )
        self._cleanup.callback(progress.close)
        job = client.job(SECONDS)
        manifest = manifest_of(self._model)
        rule = DirectRule.of(manifest, job.producers, self._tensors) if self._is_direct else None
        plan = build_plan(
            manifest,
            rank_writes(self._model, RANK),
            ConsumerId(0, 0),
            num_workers=1,
            num_slots=job.num_slots,
            max_chunk_bytes=job.max_chunk_bytes,
            direct=rule,
        )
        self._tables = {}
        for chunk in plan.chunks:
            if not chunk.is_direct:
                copies, spots, _ = scatter_copies(chunk)
                targets = [self._tensors[spot] for spot in spots]
                self._tables[chunk.index] = CopyTable(copies, self._device), targets
        self._consumer = Consumer(
            progress,
            client,
            plan=plan,
            num_workers=1,
            on_chunk=lambda chunk, packed: self._jobs.put((chunk, packed)),
            device=self._device,
            destinations=lambda module, param: self._tensors[module, param],
        )
        late.append(self._consumer)
        self._cleanup.callback(self._consumer.close)
        self._consumer.attach(SECONDS)

    def start_weight_update(self) -> None:
        self._calls.clear()

    def update_weights(self, request: Any) -> None:
        began = time.perf_counter()
        self._open.start(self._client.epoch_record(SECONDS, request.update_info["epoch"]))
        self._note(began)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        began = time.perf_counter()
        self._open.wait(SECONDS)
        self._open.commit(SECONDS)
        self._note(began)

    def shutdown_weight_transfer_engine(self) -> None:
        self._consumer = None
        self._cleanup.close()

    @property
    def _open(self) -> Consumer:
        assert self._consumer is not None, "init_weight_transfer_engine comes first"
        return self._consumer

    def _note(self, began: float) -> None:
        self._calls.append(Interval("control", -1, began, time.perf_counter()))

    def _scatter(self) -> None:
        self._events.bind_with_stream()
        while (job := self._jobs.get()) is not None:
            chunk, packed = job
            with torch.no_grad(), self._events.stream():
                table, targets = self._tables[chunk.index]
                table.run([packed], targets)
                self._open.scattered(chunk.index, self._events.record())

    # ---- what the benchmark asks -------------------------------------------------------------

    def record(self, on: bool) -> None:
        self._open.record_intervals(on)

    def trace(self) -> tuple[list[Interval], list[ChunkFacts]]:
        kept = worker_intervals(self._open.intervals)
        return [*kept, *self._calls], chunk_facts(self._open.plan)

    def plan(self) -> dict[str, int]:
        return plan_facts(self._open.plan)

    def num_wrong(self, version: int) -> tuple[int, int]:
        """(sources whose part is not where the loaders put it, sources)."""
        wrong = 0
        shapes = self._model.shapes()
        for write in rank_writes(self._model, RANK):
            name = write.slice.name
            whole = torch.empty(shapes[name], dtype=torch.bfloat16, device=self._device)
            fill(whole, name, version)
            expected = whole.as_strided(write.slice.shape, write.slice.stride, write.slice.offset)
            target = self._tensors[write.module, write.param]
            found = target.as_strided(write.shape, write.stride, write.offset)
            same = torch.equal(
                expected.reshape(write.shape).contiguous().view(torch.int16),
                found.contiguous().view(torch.int16),
            )
            wrong += not same
        return wrong, len(shapes)
