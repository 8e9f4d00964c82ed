"""Whether a sync filled this worker with what the trainer sent: checksums, slice by slice.

A slice is checked where it stands in the model, right before its module is post-processed. What
does not stand there as it was sent, because a program computes from it or its values are cast, is
checked as it arrives; then what was cast is compared with what the cast gives.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from rdt_bake import find_tensor
from rdt_bake.memory import view_memory
from rdt_plan import Chunk, Placement, SyncPlan, contiguous_stride
from rdt_plan.staging import is_staging
from rdt_transport.checksums import MAX_KEY_BYTES, region_checksum, split_checksums
from rdt_transport.pack import torch_dtype
from rdt_vllm.errors import InitInfoError, VerificationError

__all__ = ["Verification"]

MAX_NAMED = 5  # differences that one message lists


class _Check(NamedTuple):
    """A region of the model, and the slice that is placed into it: by chunk and position."""

    placement: Placement
    chunk: int
    position: int


class Verification:
    """Of one sync of one plan; each of `arrived` and `filled` is called on one thread.

    Args:
        plan: what the sync brings.
        checksums: ``update_info["checksums"]``: a key, and what each worker should find.

    Raises:
        InitInfoError: they are malformed, or not this plan's.
    """

    def __init__(self, plan: SyncPlan, checksums: Mapping[str, Any]) -> None:
        self._plan = plan
        self._key, self._expected = _expected(plan, checksums)
        self._placed: dict[str, list[_Check]] = {}
        self._arriving: dict[int, list[int]] = {}  # by chunk, positions of slices
        self._cast: dict[Placement, str] = {}
        self._left: set[object] = set()
        self._differences: list[str] = []
        for chunk in plan.chunks:
            stands: set[int] = set()
            positions = {each: at for at, each in enumerate(chunk.serve.slices)}
            for placement in chunk.placements:
                position = positions[placement.slice]
                if _stands(placement):
                    stands.add(position)
                if not is_staging(placement.param):
                    check = _Check(placement, chunk.index, position)
                    self._placed.setdefault(placement.module, []).append(check)
                    self._left.add(check)
            if moved := [at for at in positions.values() if at not in stands]:
                self._arriving[chunk.index] = moved
                self._left |= {(chunk.index, at) for at in moved}

    def arrived(self, chunk: Chunk, packed: torch.Tensor) -> None:
        """Check what will not stand in the model as it was sent; ``packed`` as it was read."""
        offsets = dict(zip(chunk.serve.slices, chunk.serve.offsets, strict=True))
        for position in self._arriving.get(chunk.index, ()):
            slice_ = chunk.serve.slices[position]
            start = offsets[slice_]
            held = packed[start : start + slice_.num_bytes]
            self._left.discard((chunk.index, position))
            if region_checksum(held, self._key) != self._expected[chunk.index][position]:
                self._differences.append(f"{slice_.name}, as it arrived")
        for placement in chunk.placements:
            if not (_stands(placement) or is_staging(placement.param)):
                self._cast[placement] = self._cast_checksum(
                    placement, packed[offsets[placement.slice] :]
                )

    def filled(self, path: str, module: nn.Module) -> None:
        """Check a module that is whole, and not post-processed yet: an `install.Observer`."""
        for check in self._placed.get(path, ()):
            placement = check.placement
            tensor = find_tensor(module, "", placement.param)
            dtype = torch_dtype(placement.dtype)
            where = f"{path}.{placement.param}"
            region = view_memory(
                tensor, dtype, placement.offset, placement.shape, placement.stride, where
            )
            if _stands(placement):
                expected = self._expected[check.chunk][check.position]
            else:
                expected = self._cast[placement]
            self._left.discard(check)
            if region_checksum(region, self._key) != expected:
                self._differences.append(f"{placement.slice.name}, as it stands in {where}")

    def finish(self) -> None:
        """Raises `VerificationError` unless every slice was checked, and none differs."""
        if self._differences:
            named = list(dict.fromkeys(self._differences))
            more = f", and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
            raise VerificationError(
                f"{self._plan.consumer} holds other than what was sent, by the checksums of "
                f"{len(named)} of its slices: {'; '.join(named[:MAX_NAMED])}{more}; its weights "
                "are wrong: send them again, and look for failing memory if that does not help"
            )
        if self._left:
            raise VerificationError(
                f"{self._plan.consumer}: {len(self._left)} slices were not seen, so nothing is "
                "known of them; this is a defect of rdt-vllm"
            )

    def _cast_checksum(self, placement: Placement, packed: torch.Tensor) -> str:
        dtype, shape = torch_dtype(placement.slice.dtype), placement.shape
        where = f"slice {placement.slice.name!r}"
        value = view_memory(packed, dtype, 0, shape, placement.source_stride, where)
        return region_checksum(value.to(torch_dtype(placement.dtype)), self._key)


def _stands(placement: Placement) -> bool:
    """Whether it puts all of its slice's bytes into the model, unchanged and in their order."""
    return (
        placement.dtype == placement.slice.dtype
        and not is_staging(placement.param)
        and prod(placement.shape) == placement.slice.numel
        and _is_dense(placement.shape, placement.source_stride)
    )


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    dense = contiguous_stride(shape)
    return all(n == 1 or s == d for n, s, d in zip(shape, stride, dense, strict=True))


def _expected(plan: SyncPlan, checksums: Any) -> tuple[bytes, list[list[str]]]:
    """The key, and by chunk of the plan the checksums of its slices."""
    try:
        key = bytes.fromhex(checksums["key"])
        if len(key) > MAX_KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes, expected at most {MAX_KEY_BYTES}")
        by_owner = checksums["workers"][str(plan.consumer.worker)]
        found = [split_checksums(by_owner[str(c.owner)][c.serve.seq]) for c in plan.chunks]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InitInfoError(
            f"update_info's checksums are none of {plan.consumer}'s plan "
            f"({type(error).__name__}: {error}): expected a key, and for each worker and owner the "
            "checksums of each chunk's slices, by seq"
        ) from error
    for chunk, each in zip(plan.chunks, found, strict=True):
        if len(each) != len(chunk.serve.slices):
            raise InitInfoError(
                f"update_info's checksums give {len(each)} for chunk {chunk.serve.seq} of rank "
                f"{chunk.owner} and {plan.consumer}: expected {len(chunk.serve.slices)}, one a "
                "slice"
            )
    return key, found
