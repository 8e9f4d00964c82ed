"""A client of an engine that lives in this process."""

from collections.abc import Mapping
from typing import Any

from rdt_trainer.client import PauseMode
from rdt_trainer.errors import ClientError

__all__ = ["LocalClient"]


class LocalClient:
    """Drives an object with the methods of ``vllm.LLM``.

    A call cannot be interrupted. `RdtTrainer` makes its calls on threads of its own and waits for
    each no longer than its ``timeout_seconds``; ``pause``, ``resume`` and ``reset_prefix_cache``
    take as long as the engine takes. The engine must not generate while a sync runs.

    Args:
        llm: the engine.
        num_workers: as `Client` says.
    """

    def __init__(self, llm: Any, *, num_workers: int = 0) -> None:
        self._llm = llm
        self.num_workers = num_workers
        self.name = type(llm).__name__

    def init(self, init_info: Mapping[str, Any]) -> None:
        self._call("init_weight_transfer_engine", {"init_info": dict(init_info)})

    def start(self) -> None:
        self._call("start_weight_update")

    def update(self, update_info: Mapping[str, Any]) -> None:
        self._call("update_weights", {"update_info": dict(update_info)})

    def finish(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def pause(self, mode: PauseMode = "abort") -> None:
        """Level-0 sleep: nothing is scheduled and no memory moves."""
        self._call("sleep", 0, mode)

    def resume(self) -> None:
        self._call("wake_up", ["scheduling"])

    def reset_prefix_cache(self) -> None:
        if self._call("reset_prefix_cache") is False:
            raise ClientError(
                f"{self.name}.reset_prefix_cache: the engine still holds cached blocks: expected "
                "no unfinished requests",
                server_text="False",
            )

    def shutdown(self) -> None:
        self._call("shutdown_weight_transfer_engine")

    def close(self) -> None:
        """Nothing to release: the engine is the caller's."""

    def _call(self, method: str, *arguments: Any) -> Any:
        function = getattr(self._llm, method, None)
        if function is None:
            raise ClientError(
                f"{self.name} has no {method}: expected the methods of vllm.LLM 0.29 or later",
                server_text=f"no method {method}",
            )
        try:
            return function(*arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise ClientError(f"{self.name}.{method}: {text}", server_text=text) from error
