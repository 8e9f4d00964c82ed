"""A stage of a real sync is slowed by a known time, and blamed for it."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from bench.gpu.recorded import chunk_facts, numbered, on_their_way, worker_intervals
from bench.stages import Interval, Trace, blame
from rdt_plan import Chunk
from rdt_trainer import JobSettings, RdtTrainer, SourceMeta
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

SLOWED = 0.5  # seconds: far more than all else takes
SHAPE = (64, 64)
NUM_LAYERS = 4


class Source:
    """Layers that are gathered, one of them slowly."""

    def __init__(self, slow: str) -> None:
        self.is_slow = False
        self._slow = slow
        self._tensors = {f"layers.{layer}.w": torch.randn(SHAPE) for layer in range(NUM_LAYERS)}
        self.metadata = [SourceMeta(name, torch.float32, SHAPE) for name in self._tensors]

    def iter_full(self):
        for name, tensor in self._tensors.items():
            if self.is_slow and self._slow == "gather" and name == "layers.2.w":
                time.sleep(SLOWED)
            yield name, tensor


class Timed(TorchEngineClient):
    """Keeps when its calls ran, as the benchmark's workers do."""

    made: list[Interval]

    def _timed(self, call: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        call(*arguments)
        self.made.append(Interval("control", len(self.made), began, time.perf_counter()))

    def start(self) -> None:
        self.made = []
        self._timed(super().start)

    def update(self, update_info: Mapping[str, Any]) -> None:
        self._timed(super().update, update_info)

    def finish(self, weight_version: str | None = None) -> None:
        self._timed(super().finish, weight_version)


class SlowCalls(Timed):
    """Its second call is slow."""

    is_slow = False

    def _timed(self, call: Any, *arguments: Any) -> None:
        if self.is_slow and len(self.made) == 1:
            super()._timed(_slowly, call, *arguments)
        else:
            super()._timed(call, *arguments)


def _slowly(call: Any, *arguments: Any) -> None:
    time.sleep(SLOWED)
    call(*arguments)


@pytest.mark.parametrize("slow", ["gather", "scatter", "control"])
def test_a_stage_of_a_real_sync_is_blamed_for_what_it_was_slowed_by(slow: str) -> None:
    fabric = InProcessFabric()
    source = Source(slow)

    def before_scatter(_: int, chunk: Chunk) -> None:
        if source.is_slow and slow == "scatter" and chunk.index == 1:
            time.sleep(SLOWED)

    client = SlowCalls(
        lambda role: InProcessWire(fabric, role), before_scatter=before_scatter, direct=False
    )
    trainer = RdtTrainer(
        source,
        client,
        settings=JobSettings(num_producers=1, max_chunk_bytes=1 << 14),
        make_wire=lambda: InProcessWire(fabric, "producer"),
    )
    with trainer:
        trainer.init()
        trainer.send_weights()
        found = []
        for is_slow in (False, True):
            source.is_slow, client.is_slow = is_slow, is_slow and slow == "control"
            found.append(blame(traced(trainer, client)))
    usual, slowed = found
    grown = {stage: slowed[stage] - usual[stage] for stage in slowed}
    assert slowed[slow] >= 0.98 * SLOWED, slowed
    assert grown[slow] > SLOWED / 2, grown  # less than all of it, where a machine was busy before
    assert max(grown, key=lambda stage: grown[stage]) == slow


def traced(trainer: RdtTrainer, client: Timed) -> Trace:
    """One sync, as both sides recorded it."""
    (consumer,) = client._consumers.values()
    trainer.record_intervals(True)
    consumer.record_intervals(True)
    start = time.perf_counter()
    trainer.send_weights()
    end = time.perf_counter()
    ours = [Interval(*each) for each in trainer.intervals]
    both = [*ours, *on_their_way(ours, client.made), *client.made]
    intervals = numbered([*both, *worker_intervals(consumer.intervals)])
    return Trace(start, end, intervals, chunk_facts(consumer.plan))
