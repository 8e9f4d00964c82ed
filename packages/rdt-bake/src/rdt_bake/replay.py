"""Replaying a recording into a model: the counterpart of what the loaders did.

Everything works on the destination's memory directly, outside autograd, and on whatever device it
is on; packed bytes are expected on the same device.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rdt_bake.errors import ReplayError
from rdt_bake.execution import run_program
from rdt_bake.memory import flat_bytes, span, view_memory
from rdt_bake.places import find_tensor
from rdt_bake.recording import Recording
from rdt_bake.tensors import first_element
from rdt_plan import Fill, Placement, Slice, Write
from rdt_plan.program import Program

__all__ = ["apply_fill", "apply_placement", "fetch_from", "read_slice", "replay", "replay_program"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def read_slice(tensor: Tensor, region: Slice) -> Tensor:
    """The elements of ``region`` in a full, contiguous source ``tensor``, as ``region.dtype``.

    Any alignment and length of the source will do. The result has the region's strides; it is a
    view of the source, or of a copy where the source starts at no whole element of
    ``region.dtype`` in its storage. Read it only.

    Raises:
        ReplayError: the tensor is not contiguous, or too small.
    """
    if not tensor.is_contiguous():
        raise ReplayError(f"source {region.name!r} is not contiguous: strides {tensor.stride()}")
    flat = flat_bytes(tensor)
    dtype = getattr(torch, region.dtype)
    item, offset = dtype.itemsize, region.offset
    stop = offset + (span(region.shape, region.stride) if region.numel else 0)
    if region.numel and stop * item > flat.numel():
        raise ReplayError(
            f"source {region.name!r} holds {flat.numel()} bytes, expected at least "
            f"{stop * item} for {region}"
        )
    if first_element(flat) % item:
        flat, offset = flat[offset * item : stop * item].clone(), 0
    return view_memory(flat, dtype, offset, region.shape, region.stride, f"source {region.name!r}")


def fetch_from(tensors: Mapping[str, Tensor]) -> Callable[[Slice], Tensor]:
    """A ``fetch`` for `replay` that reads full, contiguous tensors by name."""
    return lambda region: read_slice(tensors[region.name], region)


def apply_placement(placement: Placement, packed_slice: Tensor, destination: Tensor) -> None:
    """Copies a slice's packed bytes into its destination region.

    Args:
        placement: what to copy where.
        packed_slice: the slice's elements, contiguous and in its iteration order: 1-D, uint8.
        destination: the whole tensor at ``placement.module``, ``placement.param``.

    Raises:
        ReplayError: the bytes are not as many as the slice's, or the region leaves the destination.
    """
    region = placement.slice
    if packed_slice.dtype != torch.uint8 or packed_slice.numel() != region.num_bytes:
        raise ReplayError(
            f"{region.name!r} for {placement.module}.{placement.param}: expected "
            f"{region.num_bytes} bytes of uint8, found {packed_slice.numel()} of "
            f"{packed_slice.dtype}"
        )
    if region.numel == 0 or 0 in placement.shape:
        return
    dtype = getattr(torch, region.dtype)
    if not packed_slice.is_contiguous() or first_element(packed_slice) % dtype.itemsize:
        packed_slice = packed_slice.clone(memory_format=torch.contiguous_format)
    if region.dtype == placement.dtype:
        # The bits, whatever the dtype means by them: a copy of bools would normalise them.
        dtype = _BITS[dtype.itemsize]
        into = _region(destination, placement, dtype)
    else:
        into = _region(destination, placement, getattr(torch, placement.dtype))
    value = view_memory(
        packed_slice, dtype, 0, placement.shape, placement.source_stride, f"slice {region.name!r}"
    )
    with torch.no_grad():
        into.copy_(value)


def apply_fill(fill: Fill, destination: Tensor) -> None:
    """Writes a fill's number into its region; `ReplayError` when that leaves the destination."""
    if 0 in fill.shape:
        return
    with torch.no_grad():
        _region(destination, fill, getattr(torch, fill.dtype)).fill_(fill.value)


def replay(recording: Recording, model: nn.Module, fetch: Callable[[Slice], Tensor]) -> None:
    """Writes all of ``recording`` into ``model``'s tensors: what its loaders would have written.

    Args:
        recording: of a model built like this one.
        model: holds real tensors; tied places of the recorded model may be tied here or not.
        fetch: gives a slice's elements as a tensor of ``slice.dtype``, in the slice's iteration
            order, in any strides. Called once a distinct slice.

    Raises:
        ReplayError: a place is missing, a region does not fit, or a program fails.
    """
    spots = {group[0]: group for group in recording.aliases}
    for fill in recording.fills:
        for destination in _destinations(model, (fill.module, fill.param), spots):
            apply_fill(fill, destination)
    packed: dict[Slice, Tensor] = {}
    for placement in recording.placements:
        region = placement.slice
        if region not in packed:
            packed[region] = flat_bytes(fetch(region).contiguous())
        for destination in _destinations(model, (placement.module, placement.param), spots):
            apply_placement(placement, packed[region], destination)
    for program in recording.programs:
        replay_program(program, model, fetch)
        for param in program.targets:
            first, *others = _destinations(model, (program.module, param), spots)
            for other in others:
                other.data.copy_(first)


def replay_program(program: Program, model: nn.Module, fetch: Callable[[Slice], Tensor]) -> None:
    """Runs one program on ``model``, whose tensors say the device; see `replay`."""
    inputs = {at: flat_bytes(fetch(region).contiguous()) for at, region in program.inputs}

    def destination(param: str) -> Tensor:
        return find_tensor(model, program.module, param)

    run_program(program, inputs, destination, destination(program.targets[0]).device)


def _destinations(
    model: nn.Module,
    spot: tuple[str, str],
    spots: Mapping[tuple[str, str], tuple[tuple[str, str], ...]],
) -> list[Tensor]:
    found: list[Tensor] = []
    for module, param in spots.get(spot, (spot,)):
        tensor = find_tensor(model, module, param)
        if not any(tensor is other or tensor.is_set_to(other) for other in found):
            found.append(tensor)
    return found


def _region(destination: Tensor, write: Write, dtype: torch.dtype) -> Tensor:
    what = f"{write.module}.{write.param}"
    return view_memory(destination, dtype, write.offset, write.shape, write.stride, what)
