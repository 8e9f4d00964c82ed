"""`rdt-push`: a checkpoint on disk into running servers, without a trainer and without Ray.

`push` is the command's work, `rdt_trainer.push.command` its face.
"""

from rdt_trainer.push.outcome import PushOutcome, ServerOutcome, WorkerReads
from rdt_trainer.push.pushing import PushOptions, Stage, push

__all__ = ["PushOptions", "PushOutcome", "ServerOutcome", "Stage", "WorkerReads", "push"]
