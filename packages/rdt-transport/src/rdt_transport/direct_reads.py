"""Direct chunks as regions: where each slice lies in its owner's memory, and where it is to land.

Also the one place where the regions of a read are merged: a descriptor costs some microseconds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from rdt_plan import Chunk, Placement
from rdt_plan.dtypes import ITEM_BYTES
from rdt_plan.records import SourceRegion
from rdt_transport.destinations import Destination
from rdt_transport.errors import DisagreementError, WireError
from rdt_transport.wire.base import Region, RegionPair

__all__ = ["direct_pairs", "merged"]


def direct_pairs(
    chunk: Chunk, sources: Mapping[str, SourceRegion], destination: Destination
) -> Iterator[RegionPair]:
    """(local, remote) of each slice of a direct chunk, in order.

    Args:
        chunk: each of its slices and placements is one contiguous run.
        sources: by name, where its owner's tensors start.
        destination: the registered live tensors.

    Raises:
        DisagreementError: its owner has not published where a name lies.
        WireError: a destination is not contiguous, or too small.
    """
    for place in chunk.placements:
        region = place.slice
        source = sources.get(region.name)
        if source is None:
            raise DisagreementError(
                f"chunk {chunk.index} reads {region.name!r} directly, but producer {chunk.owner} "
                "has not published where it lies; build the plan from the job's own records"
            )
        tensor = destination(place.module, place.param)
        start = place.offset * ITEM_BYTES[place.dtype]
        _check_room(place, tensor, start + region.num_bytes)
        yield (
            Region(tensor.data_ptr() + start, region.num_bytes, tensor.device.index or 0),
            Region(
                source.address + region.offset * ITEM_BYTES[region.dtype],
                region.num_bytes,
                source.device,
            ),
        )


def _check_room(place: Placement, tensor: torch.Tensor, end: int) -> None:
    if not tensor.is_contiguous() or end > tensor.nbytes:
        raise WireError(
            f"{place.module}.{place.param}: a read of {place.slice.name!r} needs {end} contiguous "
            f"bytes, found shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.nbytes} "
            "bytes; plan only contiguous tensors as direct destinations"
        )


def merged(
    pairs: Sequence[RegionPair],
    ours: Callable[[Region], object],
    theirs: Callable[[Region], object],
) -> list[RegionPair]:
    """The same bytes in the fewest pairs, sorted by local address.

    Neighbours become one where both sides are adjacent and lie in one registered range each.

    Args:
        pairs: (local, remote), of equal lengths.
        ours: the registered range that holds a local region; raises for a stranger.
        theirs: the same for a remote region.

    Raises:
        WireError: two local regions overlap, so that what lands last would decide.
    """
    found: list[RegionPair] = []
    last: tuple[object, object] | None = None
    for local, remote in sorted(pairs, key=lambda pair: (pair[0].device, pair[0].address)):
        ranges = ours(local), theirs(remote)
        if found and _overlaps(local, found[-1][0]):
            raise WireError(f"two regions of one read land on the bytes from {local.address:#x} on")
        if last == ranges and _follows(local, found[-1][0]) and _follows(remote, found[-1][1]):
            found[-1] = (_longer(found[-1][0], local), _longer(found[-1][1], remote))
        else:
            found.append((local, remote))
        last = ranges
    return found


def _follows(region: Region, before: Region) -> bool:
    return region.address == before.address + before.num_bytes


def _overlaps(region: Region, before: Region) -> bool:
    return region.device == before.device and region.address < before.address + before.num_bytes


def _longer(region: Region, by: Region) -> Region:
    return replace(region, num_bytes=region.num_bytes + by.num_bytes)
