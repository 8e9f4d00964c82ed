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
    try:
        from rdt_vllm import _vllm

        _vllm.register_engine(BACKEND, "rdt_vllm.engine", "RdtWeightTransferEngine")
        _vllm.amend_executor(BACKEND)
    except ImportError as error:
        _logger.warning(
            "backend %r is not available, this vLLM has no weight transfer engines we know "
            "(expected vLLM %s or later): %s",
            BACKEND,
            "0.29",
            error,
        )
    except ValueError as error:
        _logger.warning("backend %r is not ours: %s", BACKEND, error)
    _registered = True
