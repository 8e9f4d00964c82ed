"""A real vLLM behind an actor's handle: what a trainer's client calls, and what a check asks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rdt_vllm.testing.report import (
    DEFAULT_PROMPT,
    ExactnessReport,
    WorkerReport,
    check_exact,
    check_tensors,
    greedy_tokens,
    observe,
)
from rdt_vllm.testing.serving import start_engine, stop_engine

__all__ = ["EngineActor"]


class EngineActor:
    """``vllm.LLM``, started in the process that makes this object. A plain class, for any actors.

    Args:
        folder: the model; what it holds is served until the first sync.
        tensor_parallel_size: workers of the engine.
        overrides: further arguments of vLLM, as for `rdt_vllm.testing.serving.engine_arguments`.
    """

    def __init__(self, folder: Path | str, tensor_parallel_size: int = 1, **overrides: Any) -> None:
        self._llm: Any = start_engine(folder, tensor_parallel_size, **overrides)

    # ---- the weight routes -----------------------------------------------------------------

    def init_weight_transfer_engine(self, request: Any) -> None:
        self._llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self._llm.update_weights(request)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)

    def shutdown_weight_transfer_engine(self) -> None:
        self._llm.shutdown_weight_transfer_engine()

    # ---- what tests and demonstrations ask -------------------------------------------------

    def observe(self) -> None:
        """Let the probe watch what the next sync fills."""
        observe(self._llm)

    def check(
        self,
        folder: Path | str,
        prompt: Sequence[int] = DEFAULT_PROMPT,
        flip: str | None = None,
    ) -> ExactnessReport:
        """Hold every worker against a fresh model that loads ``folder``: see `check_exact`."""
        return check_exact(self._llm, folder, prompt=prompt, flip=flip)

    def check_tensors(
        self, folder: Path | str, flip: str | None = None
    ) -> tuple[WorkerReport, ...]:
        """The same without generating: see `rdt_vllm.testing.report.check_tensors`."""
        return check_tensors(self._llm, folder, flip=flip)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Greedy tokens."""
        return greedy_tokens(self._llm, prompt, num_tokens)

    def traffic(self) -> list[dict[str, Any]]:
        """What the last sync did, for each worker: see `rdt_vllm.link.traffic_of`."""
        return self._llm.collective_rpc("rdt_traffic")

    def consumers(self) -> list[str]:
        """Which consumer each worker took itself for, as ``r0w1``; empty while detached."""
        return self._llm.collective_rpc("rdt_consumer")

    def stop(self) -> None:
        """End vLLM with all of its processes; safe to call again."""
        stop_engine(self._llm)
