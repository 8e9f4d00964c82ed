"""The entry point that stock vLLM calls in every one of its processes."""

import logging

__all__ = ["BACKEND", "register"]

BACKEND = "rdt"

_logger = logging.getLogger("rdt_vllm")
_registered = False


def register() -> None:
    """Make ``--weight-transfer-config '{"backend": "rdt"}'`` known to vLLM.

    Cheap, and safe to call again: the engine's module is imported only when a worker asks for it.
    It never raises, because vLLM would not start then, with or without weight transfer.
    """
    global _registered
    if _registered:
        return
    _registered = True
    try:
        from rdt_vllm import _vllm

        _vllm.register_engine(BACKEND, "rdt_vllm.engine", "RdtWeightTransferEngine")
    except ValueError as error:
        _logger.warning("backend %r is not ours: %s", BACKEND, error)
        return
    except Exception as error:
        _logger.warning(
            "backend %r is not available, this vLLM has no weight transfer engines we know "
            "(expected vLLM %s or later): %s",
            BACKEND,
            "0.29",
            error,
        )
        return
    try:
        _vllm.amend_executor(BACKEND)
    except Exception as error:
        _logger.warning(
            "backend %r is available, but this vLLM's multiprocessing executor is not the one we "
            "know, so a call that fails on one worker may leave the others' answers out of step; "
            "upgrade rdt-vllm, or use a vLLM that it was released for: %s",
            BACKEND,
            error,
        )
