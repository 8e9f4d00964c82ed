"""Serve a trainer's weights to inference workers.

`RdtTrainer` takes a `WeightSource` (a torch module: `ModuleSource`) and the inference deployments'
clients, and sends the source's weights whenever it is told to.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rdt_trainer.exports import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """From `exports`, once it is asked for: `rdt-push` begins in this package, before torch."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    exports = import_module("rdt_trainer.exports")
    if name != "__all__" and name not in exports.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(exports, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
