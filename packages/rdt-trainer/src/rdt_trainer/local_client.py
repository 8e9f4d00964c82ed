"""A client of an engine that lives in this process."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch

from rdt_trainer.arguments import checked_seconds
from rdt_trainer.call_thread import CallThread
from rdt_trainer.client import PauseMode
from rdt_trainer.errors import ClientError

__all__ = ["LocalClient"]

_REMEDY = "look for an engine core that died in its log, and make the engine and its client anew"


class LocalClient:
    """Drives an object with the methods of ``vllm.LLM``.

    The engine must not generate while a sync runs. Each call is made on a thread of its own, as it
    may never return: vLLM's waits for the answer of a process, also of one that died. Until a call
    that was given up returns, the next ones are refused.

    An engine may also run in this process, on a GPU. Its calls then use the device that was current
    where this client was made, and what they enqueued has completed when they return: the engine's
    own thread has a stream of its own, which waits for nobody's.

    Args:
        llm: the engine; made on this thread, if it runs in this process.
        num_workers: as `Client` says.
        timeout_seconds: how long one call may take.

    Raises `SettingsError` where that is no time.
    """

    def __init__(self, llm: Any, *, num_workers: int = 0, timeout_seconds: float = 300.0) -> None:
        self._llm = llm
        self.num_workers = num_workers
        self.name = type(llm).__name__
        self._timeout_seconds = checked_seconds("timeout_seconds", timeout_seconds)
        self._last: tuple[str, Future[Any]] | None = None  # the call that was made last
        # None: nothing of the engine is on a GPU of this process; asking would put something there.
        on_gpu = torch.get_device_module("cuda").is_initialized()
        self._device = torch.accelerator.current_device_index() if on_gpu else None

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
        if self._last is not None and not self._last[1].done():
            raise ClientError(
                f"{self.name}.{method}: {self._last[0]} has not returned, and an engine is in one "
                f"call at a time: {_REMEDY}",
                server_text=f"still in {self._last[0]}",
            )
        thread = CallThread(f"rdt-{self.name}")
        call = thread.submit(lambda: self._made(function, arguments))
        thread.close(wait=False)  # it ends with the call
        self._last = method, call
        if not wait([call], self._timeout_seconds).done:
            raise ClientError(
                f"{self.name}.{method}: no answer within {self._timeout_seconds:g} seconds; raise "
                f"timeout_seconds if the engine is only slow; otherwise {_REMEDY}",
                server_text="no answer",
            )
        try:
            return call.result()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise ClientError(f"{self.name}.{method}: {text}", server_text=text) from error

    def _made(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if self._device is None:
            return function(*arguments)
        torch.accelerator.set_device_index(self._device)
        try:
            return function(*arguments)
        finally:
            torch.accelerator.current_stream().synchronize()
