"""Finding out which tensors a loader replaced instead of filling.

``param.data = x`` and ``module.w = Parameter(x)`` make no operation that a mode could see, so after
the load every place of the model is compared with what was there before. What counts is the state
at the end: memory that a place no longer holds is nobody's, whatever was written to it.
"""

from typing import NoReturn

import torch
from torch import Tensor, nn

from rdt_bake.destinations import Destination, DestinationStorage
from rdt_bake.errors import RebindError, RecordError
from rdt_bake.ledger import Ledger
from rdt_bake.origins import Computed, Copied, Origin, Source
from rdt_bake.places import Place, places
from rdt_bake.tensors import geometry, has_storage, storage_key
from rdt_bake.twins import MetaTwins

__all__ = ["land_rebinds"]

_aten = torch.ops.aten

_Spot = tuple[str, str]


def land_rebinds(model: nn.Module, twins: MetaTwins, ledger: Ledger) -> None:
    """Turns each rebind to a region of a source into a landing of the whole destination.

    Call it after the load and outside the mode, while ``model`` holds what the loader left there.

    Raises:
        RebindError: a place holds anything else, or nothing.
    """
    now = {(place.module, place.param): place for place in places(model)}
    for destination in twins.destinations:
        found = [(spot, now.pop(spot, None)) for spot in destination.places]
        moved = [(s, p) for s, p in found if p is None or not _holds(destination, p.tensor)]
        if moved:
            _land(destination, moved, len(found), ledger)
    for place, _ in twins.foreign.values():
        spot = place.module, place.param
        left = now.pop(spot, None)
        if (left is None or left.tensor is not place.tensor) and place.kind != "attribute":
            _refuse(spot, left, "another tensor than the one it held", ledger)
    for spot, place in now.items():
        origin = ledger.origin(place.tensor)
        if place.kind == "parameter" or _carries_weights(origin):
            _refuse(spot, place, "a tensor it did not have before the load", ledger)


def _holds(destination: Destination, tensor: Tensor) -> bool:
    """Whether ``tensor`` is still the destination's memory, seen the same way."""
    return (
        has_storage(tensor)
        and storage_key(tensor) in destination.keys
        and geometry(tensor)[1:]
        == (destination.offset, destination.shape, destination.stride, destination.dtype)
    )


def _carries_weights(origin: Origin | None) -> bool:
    return isinstance(origin, (Source, Copied)) or (isinstance(origin, Computed) and origin.derived)


def _land(
    destination: Destination,
    moved: list[tuple[_Spot, Place | None]],
    num_places: int,
    ledger: Ledger,
) -> None:
    spot, place = moved[0]
    if place is None:
        if destination.kind != "attribute":
            _refuse(spot, None, "nothing", ledger)
        return
    tensor = place.tensor
    origin = ledger.origin(tensor)
    if destination.kind == "attribute" and not (
        _carries_weights(origin) or isinstance(origin, DestinationStorage)
    ):
        return  # a plain attribute whose new value has nothing to do with weights
    if len(moved) != num_places or any(
        p is None or not has_storage(p.tensor) or geometry(p.tensor) != geometry(tensor)
        for _, p in moved
    ):
        _refuse(spot, place, "a tensor that its tied places do not share any more", ledger)
    storage = destination.storage
    if len(storage.destinations) > 1:
        _refuse(spot, place, "other memory than the tensors it was a view with", ledger)
    if tuple(tensor.shape) != destination.shape or tensor.dtype != destination.dtype:
        found = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
        _refuse(spot, place, found, ledger, destination)
    before = len(ledger.landings)
    try:
        ledger.land(storage, destination.view(), tensor, _aten.copy_.default)
    except RecordError as error:
        _refuse(spot, place, "a tensor that cannot land", ledger, cause=error)
    if not storage.programmed:
        ledger.landings[:before] = [
            each for each in ledger.landings[:before] if each.storage is not storage
        ]


def _refuse(
    spot: _Spot,
    place: Place | None,
    found: str,
    ledger: Ledger,
    destination: Destination | None = None,
    *,
    cause: RecordError | None = None,
) -> NoReturn:
    origin = ledger.origin(place.tensor) if place is not None else None
    weight = where = op = None
    if isinstance(origin, Source):
        weight = origin.name
    elif isinstance(origin, Copied):
        weight, where, op = origin.name, origin.where, origin.op
    elif isinstance(origin, Computed):
        weight, where, op = origin.weight, origin.where, origin.op
    elif place is not None and (own := ledger.own_tensors.get(place.tensor)) is not None:
        weight = own.weight
    kind = place.kind if place is not None else "tensor"
    message = f"after the load this {kind} holds {found}"
    if destination is not None:
        message += f", expected shape {destination.shape} and {destination.dtype}"
    if op is not None:
        message += f" (made by {op})"
    message += "; copy into the tensor the model already has instead of replacing it"
    raise RebindError(
        message, weight=weight, op=op, where=where, module=spot[0], param=spot[1]
    ) from cause
