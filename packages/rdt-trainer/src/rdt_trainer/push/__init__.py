"""`rdt-push`: a checkpoint on disk into running servers, without a trainer and without Ray.

`push` is the command's work, `rdt_trainer.push.command` its face; `rdt_trainer.push.entry` is where
it begins.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rdt_trainer.push.outcome import PushOutcome, ServerOutcome, WorkerReads
    from rdt_trainer.push.pushing import PushOptions, Stage, push

__all__ = ["PushOptions", "PushOutcome", "ServerOutcome", "Stage", "WorkerReads", "push"]


def __getattr__(name: str) -> Any:
    """Once it is asked for: `entry` comes before torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = "pushing" if name in ("PushOptions", "Stage", "push") else "outcome"
    return getattr(import_module(f"rdt_trainer.push.{place}"), name)
