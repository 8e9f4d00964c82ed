"""Record a model's own weight loaders once, and replay them from slices of the weights."""

from rdt_bake.errors import (
    ComputedValueError,
    CoverageError,
    DataDependentError,
    OverlapError,
    RdtBakeError,
    RebindError,
    RecordError,
    ReplayError,
    UnsupportedTensorError,
)
from rdt_bake.execution import run_program
from rdt_bake.places import find_tensor
from rdt_bake.plan_replay import PlanReplay
from rdt_bake.record import record
from rdt_bake.recording import Recording, Uncovered
from rdt_bake.replay import apply_fill, apply_placement, fetch_from, read_slice, replay
from rdt_bake.report import report
from rdt_bake.written_targets import written_targets

__all__ = [
    "ComputedValueError",
    "CoverageError",
    "DataDependentError",
    "OverlapError",
    "PlanReplay",
    "RdtBakeError",
    "RebindError",
    "RecordError",
    "Recording",
    "ReplayError",
    "Uncovered",
    "UnsupportedTensorError",
    "apply_fill",
    "apply_placement",
    "fetch_from",
    "find_tensor",
    "read_slice",
    "record",
    "replay",
    "report",
    "run_program",
    "written_targets",
]
