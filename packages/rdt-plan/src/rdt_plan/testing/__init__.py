"""Hypothesis strategies and a reference implementation, for this package's users and tests.

Needs ``hypothesis``; nothing that ``import rdt_plan`` loads does.
"""

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
    "writes",
]
