"""Where direct reads land: never twice on one byte, whatever the plan or the memory make of it."""

import pytest
import torch

from rdt_plan import ConsumerId, DirectRule, Manifest, ParamMeta, Placement, build_plan, whole
from rdt_transport.destinations import Destinations
from rdt_transport.errors import WireError

PARAMS = [ParamMeta(f"layers.{layer}.w", "float32", (8,)) for layer in (0, 1)]
MANIFEST = Manifest.build(PARAMS)  # a group each, so a direct chunk each


def destinations(*places: tuple[str, int], **tensors: torch.Tensor) -> Destinations:
    """Of a plan that reads one parameter to each of these (name, offset), and of these tensors."""
    writes = [
        Placement(whole(param), "m", name, offset, (8,), (1,), "float32", (1,))
        for param, (name, offset) in zip(PARAMS, places, strict=True)
    ]
    live = {("m", name) for name in tensors}
    rule = DirectRule({0: frozenset(param.name for param in PARAMS)}, frozenset(live))
    plan = build_plan(MANIFEST, writes, ConsumerId(0, 0), num_workers=1, direct=rule)
    assert [chunk.is_direct for chunk in plan.chunks] == [True, True]
    return Destinations(plan, lambda module, name: tensors[name])


def test_reads_that_land_beside_each_other_are_taken() -> None:
    memory = torch.zeros(16)
    assert len(destinations(("w", 8), ("w", 0), w=memory).buffers) == 1
    assert len(destinations(("a", 0), ("b", 0), a=memory[8:], b=memory[:8]).buffers) == 1
    assert len(destinations(("a", 0), ("b", 0), a=torch.zeros(8), b=torch.zeros(8)).buffers) == 2


def test_reads_of_two_chunks_into_the_same_bytes_are_refused_by_name() -> None:
    reason = r"layers\.1\.w into m\.w and of layers\.0\.w into m\.w land on the same bytes"
    with pytest.raises(WireError, match=reason):
        destinations(("w", 7), ("w", 0), w=torch.zeros(15))

    memory = torch.zeros(15)
    reason = r"layers\.0\.w into m\.a and of layers\.1\.w into m\.b land on the same bytes"
    with pytest.raises(WireError, match=reason):
        destinations(("a", 0), ("b", 0), a=memory[:8], b=memory[7:])
