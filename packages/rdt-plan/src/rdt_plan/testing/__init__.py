"""Hypothesis strategies, a reference implementation, and what a state machine accepts.

Needs ``hypothesis``; nothing that ``import rdt_plan`` loads does.
"""

from rdt_plan.testing.moves import accepted_moves, snapshot
from rdt_plan.testing.reference import elements, pack_slice, place, serve_chunk
from rdt_plan.testing.strategies import (
    dtype_names,
    fills,
    manifests,
    param_metas,
    placements,
    plans,
    regions,
    slices,
    writes,
)

__all__ = [
    "accepted_moves",
    "dtype_names",
    "elements",
    "fills",
    "manifests",
    "pack_slice",
    "param_metas",
    "place",
    "placements",
    "plans",
    "regions",
    "serve_chunk",
    "slices",
    "snapshot",
    "writes",
]
