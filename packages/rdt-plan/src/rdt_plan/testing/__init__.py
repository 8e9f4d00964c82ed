"""Hypothesis strategies, a reference implementation, what a state machine accepts, errors.

Needs ``hypothesis``; nothing that ``import rdt_plan`` loads does.
"""

from rdt_plan.testing.effort import FUZZ_VARIABLE, num_examples
from rdt_plan.testing.errors import assert_carried, errors_of
from rdt_plan.testing.fleets import small_fleet
from rdt_plan.testing.meshes import mesh_placements, over_a_mesh
from rdt_plan.testing.moves import accepted_moves, snapshot
from rdt_plan.testing.programs import programs
from rdt_plan.testing.reference import elements, pack_slice, piece_bytes, place, serve_chunk
from rdt_plan.testing.serve_tables import read_chunks, serve_table
from rdt_plan.testing.strategies import (
    direct_rules,
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
    "FUZZ_VARIABLE",
    "accepted_moves",
    "assert_carried",
    "direct_rules",
    "dtype_names",
    "elements",
    "errors_of",
    "fills",
    "manifests",
    "mesh_placements",
    "num_examples",
    "over_a_mesh",
    "pack_slice",
    "param_metas",
    "piece_bytes",
    "place",
    "placements",
    "plans",
    "programs",
    "read_chunks",
    "regions",
    "serve_chunk",
    "serve_table",
    "slices",
    "small_fleet",
    "snapshot",
    "writes",
]
