"""The inference server of the demo: a real vLLM in an actor of its own."""

from collections.abc import Sequence
from typing import Any

from rdt_vllm.testing.report import ExactnessReport, check_exact, greedy_tokens, observe
from rdt_vllm.testing.serving import start_engine, stop_engine

__all__ = ["DemoServer"]


class DemoServer:
    """vLLM's ``LLM``, reachable by actor handle: the weight routes, and what the demo asks.

    A plain class; the demo runs it as a Ray actor. Its weights are random until the first sync.
    """

    def __init__(self, folder: str, tensor_parallel_size: int) -> None:
        self._llm = start_engine(folder, tensor_parallel_size, load_format="dummy")

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

    def observe(self) -> None:
        """Let the probe watch what the next sync fills."""
        observe(self._llm)

    def check(self, folder: str, prompt: Sequence[int], flip: str | None = None) -> ExactnessReport:
        """Hold every worker against a fresh model that loads ``folder``."""
        return check_exact(self._llm, folder, prompt=prompt, flip=flip)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Greedy tokens."""
        return greedy_tokens(self._llm, prompt, num_tokens)

    def traffic(self) -> list[dict[str, Any]]:
        """What each worker pulled and landed in the last sync: see `ExactnessProbe.rdt_traffic`."""
        return self._llm.collective_rpc("rdt_traffic")

    def stop(self) -> None:
        """End vLLM with all of its processes."""
        stop_engine(self._llm)
