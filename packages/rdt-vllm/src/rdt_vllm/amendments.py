"""Repairs of stock vLLM, without which a sync that failed could not be healed by the next one.

Each wraps methods of a class it is given, for engines of our backend alone. Idempotent.
"""

import functools
import logging
import pickle
import time
import uuid
from collections.abc import Callable
from typing import Any

import cloudpickle

__all__ = ["end_open_updates", "keep_answers_in_step", "refuse_sleep_in_updates"]

_logger = logging.getLogger("rdt_vllm")

RESYNC_SECONDS = 60.0  # a worker answers when its present call ends

_MARK = "_rdt_amended"
_ASLEEP = "_rdt_asleep"  # of a worker: its weights' memory is gone until it wakes up
_ECHOES = "_rdt_echoes"  # of an executor: which worker still owes which token

# Calls that answer through futures, or whose failure ends the engine anyway.
_FORWARDS = ("execute_model", "sample_tokens")


# ---- a worker's update, which must not stay open -----------------------------------------------


def end_open_updates(worker: Any) -> None:
    """Let no update of our engine that was never finished stand in the way of class ``worker``.

    Stock vLLM refuses a start and a shutdown while an update is open, and leaves one open when
    `finish_weight_update` raises, when `update_weights` raised on another worker, and when whoever
    started it went away. So a start and a shutdown end it first, and so does a failing finish; our
    engine then gives up what it had begun.
    """

    def ending_first(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            _end_update(self)
            asleep = _is_ours(self) and getattr(self, _ASLEEP, False)
            if asleep and stock.__name__ == "start_weight_update":
                raise RuntimeError(
                    "this worker sleeps, and its weights have no memory to be written into: wake "
                    "it up, or at least its weights, before the weight update"
                )
            return stock(self, *args, **kwargs)

        return call

    def ending_when_it_fails(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return stock(self, *args, **kwargs)
            except BaseException:
                _end_update(self)
                raise

        return call

    _amend(worker, "start_weight_update", ending_first)
    _amend(worker, "finish_weight_update", ending_when_it_fails)
    if hasattr(worker, "shutdown_weight_transfer_engine"):  # not every version detaches
        _amend(worker, "shutdown_weight_transfer_engine", ending_first)


def refuse_sleep_in_updates(worker: Any) -> None:
    """Let class ``worker`` not fall asleep while our engine writes into its weights.

    Sleeping takes their memory away. A worker that sleeps refuses a start until its weights are
    awake (`end_open_updates`).
    """

    def refusing(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _has_open_update(self):
                raise RuntimeError(
                    "the weights of this worker are being replaced, so it cannot sleep: finish the "
                    "weight update first, or shut its weight transfer down"
                )
            setattr(self, _ASLEEP, True)
            return stock(self, *args, **kwargs)

        return sleep

    def noting(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def wake_up(self: Any, tags: list[str] | None = None) -> Any:
            answer = stock(self, tags)
            if tags is None or "weights" in tags:
                setattr(self, _ASLEEP, False)
            return answer

        return wake_up

    _amend(worker, "sleep", refusing)
    _amend(worker, "wake_up", noting)


def _is_ours(worker: Any) -> bool:
    engine: Any = getattr(worker, "weight_transfer_engine", None)
    return getattr(engine, "gives_up_open_updates", False)


def _has_open_update(worker: Any) -> bool:
    return _is_ours(worker) and getattr(worker, "_weight_update_active", False)


def _end_update(worker: Any) -> None:
    if _has_open_update(worker):
        worker._weight_update_active = False
        worker.weight_transfer_engine.reset_weight_update_target()


# ---- an executor's answers, which must stay in step --------------------------------------------


def keep_answers_in_step(executor: Any, backend: str) -> None:
    """Let class ``executor`` read every worker's answer to a call that failed, and throw it away.

    Stock vLLM stops reading at the first worker that raised, and takes what the others answered
    for their answers to the *next* call, and so on for ever: a later finish could return before
    every worker is done. After a failure the workers are asked to echo a fresh token, and all that
    comes before it belongs to the past. A worker that is too busy to echo is waited for again by
    the next call, which raises `TimeoutError` rather than take an old answer for its own.

    Raises `AttributeError` when the class is not the one we know.
    """

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
            config = getattr(self.vllm_config, "weight_transfer_config", None)
            if config is None or config.backend != backend:
                return stock(self, method, *args, **kwargs)
            if not self.is_failed:
                _read_echoes(self)
            try:
                return stock(self, method, *args, **kwargs)
            except Exception as error:
                # What a future is still to read must not be thrown away.
                futures = kwargs.get("non_block") or getattr(self, "futures_queue", ())
                if not (self.is_failed or futures or method in _FORWARDS):
                    _resynchronise(self, error)
                raise

        return collective_rpc

    _amend(executor, "collective_rpc", wrap)


def _resynchronise(executor: Any, error: Exception) -> None:
    """Ask for echoes and read up to them; what goes wrong is logged, ``error`` matters more."""
    token = uuid.uuid4().hex
    call = cloudpickle.dumps(_echo, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        executor.rpc_broadcast_mq.enqueue((call, (token,), {}, None), timeout=RESYNC_SECONDS)
        setattr(executor, _ECHOES, dict.fromkeys(range(len(executor.response_mqs)), token))
        _read_echoes(executor)
    except Exception as failure:
        _logger.warning(
            "the workers' answers may be out of step after a call that failed (%s): %s; if later "
            "calls fail as well, restart the engine",
            error,
            failure,
        )


def _read_echoes(executor: Any) -> None:
    """Read every owed echo and all that comes before it; `TimeoutError` names who is too late."""
    owed: dict[int, str] = getattr(executor, _ECHOES, {})
    deadline = time.monotonic() + RESYNC_SECONDS
    for worker, token in list(owed.items()):
        answer = None
        while not (isinstance(answer, str) and answer == token):
            try:
                left = max(0.0, deadline - time.monotonic())
                _, answer = executor.response_mqs[worker].dequeue(timeout=left)
            except TimeoutError as error:
                raise TimeoutError(
                    f"worker {worker} has not answered for {RESYNC_SECONDS:g} s since a call "
                    "failed: it is busy with that call, or hangs; call again, or restart the engine"
                ) from error
        del owed[worker]


def _echo(worker: Any, token: str) -> str:
    del worker
    return token


def _amend(owner: Any, method: str, wrap: Callable[[Any], Any]) -> None:
    stock = getattr(owner, method)
    if not hasattr(stock, _MARK):
        amended = wrap(stock)
        setattr(amended, _MARK, True)
        setattr(owner, method, amended)
