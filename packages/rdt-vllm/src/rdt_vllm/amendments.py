"""Two repairs of stock vLLM, without which a sync that failed could not be healed by the next one.

Each wraps one method of a class it is given, for engines of our backend alone. Idempotent.
"""

import functools
import pickle
import time
import uuid
from collections.abc import Callable
from typing import Any

import cloudpickle

__all__ = ["end_failed_finish", "keep_answers_in_step"]

RESYNC_SECONDS = 60.0  # a worker answers when its present call ends

_MARK = "_rdt_amended"


def end_failed_finish(worker: Any) -> None:
    """End the update of class ``worker`` when `finish_weight_update` of our engine raises.

    Stock vLLM leaves the update open then, and refuses the next `start_weight_update`: the sync
    that would heal the worker. (It does end the update when `update_weights` raises.)
    """

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def finish_weight_update(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return stock(self, *args, **kwargs)
            except BaseException:
                engine: Any = getattr(self, "weight_transfer_engine", None)
                if getattr(engine, "ends_failed_finish", False):
                    self._weight_update_active = False
                    engine.reset_weight_update_target()
                raise

        return finish_weight_update

    _amend(worker, "finish_weight_update", wrap)


def keep_answers_in_step(executor: Any, backend: str) -> None:
    """Let class ``executor`` read every worker's answer to a call that failed, and throw it away.

    Stock vLLM stops reading at the first worker that raised, and takes what the others answered
    for their answers to the *next* call, and so on for ever: a later finish could return before
    every worker is done. After a failure the workers are asked to echo a fresh token, and all that
    comes before it belongs to the past.
    """

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def collective_rpc(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return stock(self, *args, **kwargs)
            except Exception:
                config = self.vllm_config.weight_transfer_config
                if config is not None and config.backend == backend and not self.is_failed:
                    _await_echo(self)
                raise

        return collective_rpc

    _amend(executor, "collective_rpc", wrap)


def _await_echo(executor: Any) -> None:
    token = uuid.uuid4().hex
    call = cloudpickle.dumps(_echo, protocol=pickle.HIGHEST_PROTOCOL)
    executor.rpc_broadcast_mq.enqueue((call, (token,), {}, None))
    deadline = time.monotonic() + RESYNC_SECONDS
    for answers in executor.response_mqs:
        while answers.dequeue(timeout=max(0.0, deadline - time.monotonic()))[1] != token:
            pass


def _echo(worker: Any, token: str) -> str:
    del worker
    return token


def _amend(owner: Any, method: str, wrap: Callable[[Any], Any]) -> None:
    stock = getattr(owner, method)
    if not hasattr(stock, _MARK):
        amended = wrap(stock)
        setattr(amended, _MARK, True)
        setattr(owner, method, amended)
