"""What of a parameter nothing writes, in the parameter's own indices."""

from collections.abc import Sequence
from math import prod

from torch.nn.parameter import is_lazy

from rdt_bake.destinations import Destination
from rdt_bake.layouts import Layout
from rdt_bake.places import Place
from rdt_bake.recording import Uncovered
from rdt_bake.regions import Region

__all__ = ["uncovered", "whole"]


def whole(place: Place) -> Uncovered:
    """A parameter that could not be watched at all (of a foreign class, or uninitialised)."""
    if is_lazy(place.tensor):
        return Uncovered(place.module, place.param, (), 0, ())
    shape = tuple(place.tensor.shape)
    bounds = tuple((0, extent) for extent in shape)
    return Uncovered(place.module, place.param, shape, prod(shape), bounds)


def uncovered(
    destination: Destination, missing: Sequence[Region], unit_bytes: int
) -> Uncovered | None:
    """Describes the ``missing`` regions, in units of ``unit_bytes``; None when there are none."""
    if not missing:
        return None
    scale = destination.dtype.itemsize // unit_bytes
    start = destination.offset * scale
    shape, stride = destination.shape, [step * scale for step in destination.stride]
    layout = Layout((*shape, scale), (*stride, 1))
    spans: list[Sequence[tuple[int, int]]] = []
    for region in missing:
        pieces = layout.trace(region.offset - start, region.shape, region.stride)
        if pieces is None:
            spans.append([(0, extent) for extent in shape])
        else:
            spans += [piece.spans() for piece in pieces]
    bounds = tuple(
        (min(span[dim][0] for span in spans), max(span[dim][1] for span in spans))
        for dim in range(len(shape))
    )
    num_missing = -(-sum(region.numel for region in missing) // scale)
    return Uncovered(destination.module, destination.param, shape, num_missing, bounds)
