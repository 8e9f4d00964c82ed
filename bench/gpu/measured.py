"""The actors of one model, and what was measured with them."""

import logging
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.devices import Devices, is_gpu
from bench.gpu.fsdp_trainer import FsdpTrainer
from bench.gpu.rank_worker import RankWorker
from bench.gpu.recorded import numbered, on_their_way
from bench.gpu.trainer import GpuTrainer
from bench.gpu.ways import Way
from bench.gpu.worker import GpuWorker
from bench.stages import Trace, blame, busy
from rdt_transport import JobSettings

__all__ = ["Bench", "Result"]

CALL_SECONDS = 180.0
_TARGETS = {
    ("dense", "rdt"): 12.0,
    ("moe", "rdt"): 8.0,
    ("dense", "rdt staged"): 4.0,
    ("moe", "rdt staged"): 4.0,
}


@dataclass
class Result:
    """One way to sync one model; ``target``: how many times faster than the peer it is to be."""

    seconds: list[float] = field(default_factory=list)
    wrong: tuple[int, int] | None = None
    init_seconds: float = 0.0
    target: float = 0.0
    plan: dict[str, int] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    blame: dict[str, float] = field(default_factory=dict)
    trace: list[tuple[str, int, float, float]] = field(default_factory=list)  # ms from its start
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether there is a median."""
        return not self.error and len(self.seconds) > 1

    @property
    def is_exact(self) -> bool:
        """Whether all was compared, and nothing differs."""
        return self.wrong is not None and not self.wrong[0]

    @property
    def median(self) -> float:
        """Of the warm syncs."""
        return statistics.median(self.seconds[1:])


class Bench:
    """A trainer of one rank or several, and the workers of one deployment, for one model.

    Args:
        devices: one for each rank and each worker.
        syncs: warm ones, of each path.
        meeting: a path that is free, as are those that begin with it; where processes meet.
    """

    def __init__(self, kind: str, tiny: bool, devices: Devices, syncs: int, meeting: str) -> None:
        import ray

        self.kind, self.results = kind, dict[str, Result]()
        self.num_bytes, self.describe = 0, dict[str, str]()
        self._ray, self._syncs, self._version = ray, syncs, 0
        self._devices = devices
        share = {"num_gpus": 0.1 if is_gpu(devices.trainers[0]) else 0, "num_cpus": 1}
        kind_of_worker: Any = RankWorker if kind == "rank" else GpuWorker
        worker = ray.remote(kind_of_worker).options(enable_tensor_transport=True, **share)
        self.workers = _made(worker, kind, tiny, devices.workers, meeting)
        kind_of_trainer: Any = FsdpTrainer if len(devices.trainers) > 1 else GpuTrainer
        trainer = ray.remote(kind_of_trainer).options(**share)
        self.trainers = _made(trainer, kind, tiny, devices.trainers, f"{meeting}-trainers")
        self.worker, self.trainer = self.workers[0], self.trainers[0]

    def wait(self) -> None:
        """Until all are there."""
        self.num_bytes = self.each(self.trainers, "num_bytes")[0]
        self.describe = self.each(self.workers, "describe")[0]

    def device_copy_seconds(self, to: str) -> float:
        """Of as many bytes as a sync moves, from the device of the trainer's first rank."""
        return self.get(self.trainer.device_copy_seconds.remote(self.num_bytes, to))

    def get(self, reference: Any) -> Any:
        return self._ray.get(reference, timeout=CALL_SECONDS)

    def each(self, actors: list[Any], method: str, *arguments: Any) -> list[Any]:
        """What every one answers; all are asked at once."""
        return self.get([getattr(each, method).remote(*arguments) for each in actors])

    def ours(self, way: Way, lookahead: int) -> Result:
        """Measure our backend; with a trace where that is one rank's first way of a variant."""

        def attach() -> float:
            settings = JobSettings(
                num_producers=len(self.trainers),
                num_slots=way.num_slots,
                max_chunk_bytes=way.max_chunk_mib << 20,
                lookahead=lookahead,
            )
            self.each(self.workers, "use", "rdt", way.options)
            return max(self.each(self.trainers, "use_rdt", self.workers, settings, way.source))

        def look(result: Result) -> None:
            result.plan = Counter[str]()
            for plan in self.each(self.workers, "plan"):
                result.plan.update(plan)
            self.num_bytes = result.plan["direct_bytes"] + result.plan["staged_bytes"]
            if way.is_first and len(self.trainers) == 1:
                result.target = _TARGETS.get((self.kind, way.variant), 0.0)
                self._trace(result)

        return self._measure(way.name, attach, look)

    def theirs(self, name: str, backend: str, namespace: str, packed: bool = False) -> Result:
        """Measure one of vLLM's backends."""

        def attach() -> float:
            self.get(self.worker.use.remote(backend, {}))
            return self.get(self.trainer.use_vllm.remote(self.worker, backend, namespace, packed))

        return self._measure(name, attach)

    def _measure(
        self,
        name: str,
        attach: Callable[[], float],
        look: Callable[[Result], None] = lambda result: None,
    ) -> Result:
        result = self.results[name] = Result()
        try:
            result.init_seconds = attach()
            for _ in range(self._syncs + 1):
                began, ended = self._sync()
                result.seconds.append(ended - began)
            found = self.each(self.workers, "num_wrong", self._version)
            result.wrong = sum(wrong for wrong, _ in found), sum(count for _, count in found)
            look(result)
        except Exception as error:  # a row of the table: the others are measured all the same
            result.error = f"{type(error).__name__}: {error}".strip()[-2000:]
        return result

    def _sync(self) -> tuple[float, float]:
        """From when the first rank began it until the last one returned."""
        self._version += 1
        self.each(self.trainers, "set_version", self._version)
        began, ended = zip(*self.each(self.trainers, "sync"), strict=True)
        return min(began), max(ended)

    def _trace(self, result: Result) -> None:
        """Syncs with their stages recorded: the median one's."""
        for actor in (self.trainer, self.worker):
            self.get(actor.record.remote(True))
        traces = []
        for _ in range(3):
            start, end = self._sync()
            calls, facts = self.get(self.worker.trace.remote())
            ours = self.get(self.trainer.intervals.remote())
            both = numbered([*ours, *on_their_way(ours, calls), *calls])
            traces.append(Trace(start, end, both, facts))
        for actor in (self.trainer, self.worker):
            self.get(actor.record.remote(False))
        trace = sorted(traces, key=lambda each: each.end - each.start)[1]
        result.busy, result.blame = busy(trace), blame(trace)
        for stage, index, began, ended in sorted(trace.intervals, key=lambda each: each.start):
            ms = [round((each - trace.start) * 1e3, 3) for each in (began, ended)]
            result.trace.append((stage, index, ms[0], ms[1]))

    def end(self) -> None:
        """Detach the workers, and end every actor."""
        try:
            self.each(self.trainers, "end")
        except Exception as error:  # what was measured is to be told all the same
            logging.error("%s: the trainer did not end: %s", self.kind, error)
        finally:
            for actor in (*self.workers, *self.trainers):
                self._ray.kill(actor)


def _made(actor: Any, kind: str, tiny: bool, devices: tuple[str, ...], meeting: str) -> list[Any]:
    """An actor a device; several know their rank, and where they meet."""
    if len(devices) == 1:
        return [actor.remote(kind, tiny, devices[0])]
    return [
        actor.remote(kind, tiny, device, rank, len(devices), meeting)
        for rank, device in enumerate(devices)
    ]
