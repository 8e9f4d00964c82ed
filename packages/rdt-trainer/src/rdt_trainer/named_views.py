"""Checkpoint names for parts of a tensor: an explicit mapping, by views, checked to be complete.

A trainer may hold in one tensor what its checkpoint spreads over many: all experts of a layer,
gate beside up. `NamedView` says which part has which name. What a view selects is read off its
result once, as a `Region`; each pass then serves that region, and no user's code runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Self

import torch

from rdt_plan.errors import SliceError
from rdt_plan.slices import Slice, canonical, contiguous_stride, last_element
from rdt_trainer.errors import SourceError

__all__ = ["NamedView", "Region", "regions"]


def _all_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class NamedView:
    """A checkpoint name, and the part of a trainer's tensor that it stands for.

    Attributes:
        name: the checkpoint name.
        view: takes the whole, contiguous tensor and returns a view of it: indexing by integers
            and ranges, ``chunk``, ``unbind``, ``transpose``, ``view`` and the like. Called once,
            on a meta tensor. The default is all of it.
    """

    name: str
    view: Callable[[torch.Tensor], torch.Tensor] = _all_of


@dataclass(frozen=True, slots=True)
class Region:
    """Some elements of a contiguous tensor, in a shape of their own; itself a view.

    Attributes:
        offset: the first element, counted from the tensor's start.
        shape: extents.
        stride: one a dim, in elements.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, view: torch.Tensor) -> Self:
        """What ``view`` shows of a tensor at the start of its memory."""
        return cls(int(view.storage_offset()), tuple(view.shape), view.stride())

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region of ``tensor``, which is contiguous; shares its memory."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is served from the tensor's memory, without a copy."""
        steps = zip(self.shape, self.stride, contiguous_stride(self.shape), strict=True)
        return 0 in self.shape or all(n == 1 or found == step for n, found, step in steps)


def regions(
    tensor_name: str, shape: Sequence[int], dtype: torch.dtype, views: Sequence[NamedView]
) -> list[Region]:
    """What each view selects of a tensor; together every element once.

    Raises:
        SourceError: names the tensor, and the checkpoint name where one is to blame: a view that
            fails, computes, copies or reinterprets, elements that two serve, or that none does.
    """
    whole = torch.empty(tuple(shape), dtype=dtype, device="meta")
    found = [_region(tensor_name, whole, named) for named in views]
    runs = [_run(tensor_name, named, region) for named, region in zip(views, found, strict=True)]
    seen = _Cells(whole.numel(), runs)
    for run in runs:
        seen.of(run).fill_(True)
    if sum(run.numel for run in runs) != whole.numel() or not seen.cells.all():
        raise SourceError(_incomplete(tensor_name, shape, views, runs, seen))
    return found


def _region(tensor_name: str, whole: torch.Tensor, named: NamedView) -> Region:
    try:
        part = named.view(whole)
    except Exception as error:
        problem = f"failed on a meta tensor with {type(error).__name__}: {error}"
        raise _refusal(tensor_name, named, problem) from error
    if not isinstance(part, torch.Tensor):
        raise _refusal(tensor_name, named, f"is a {type(part).__name__}")
    if part.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        raise _refusal(tensor_name, named, "is a new tensor, which was computed or copied")
    if part.dtype != whole.dtype or part.is_conj() or part.is_neg():
        raise _refusal(tensor_name, named, f"reads its {whole.dtype} as something else")
    region = Region.of(part)
    if part.numel() and last_element(region.offset, region.shape, region.stride) >= whole.numel():
        raise _refusal(tensor_name, named, f"reaches beyond its {whole.numel()} elements")
    return region


def _refusal(tensor_name: str, named: NamedView, problem: str) -> SourceError:
    return SourceError(
        f"{named.name}, a view of {tensor_name}, {problem}: expected some of its elements in its "
        "own memory; index, narrow, chunk, transpose or view it, and compute nothing"
    )


def _run(tensor_name: str, named: NamedView, region: Region) -> Slice:
    """The region in memory order, which is that of its strides: transposed, it covers the same."""
    dims = sorted(zip(region.stride, region.shape, strict=True), reverse=True)
    shape, stride = [extent for _, extent in dims], [step for step, _ in dims]
    try:
        return canonical(tensor_name, "", region.offset, shape, stride)
    except SliceError as error:
        raise _refusal(tensor_name, named, "repeats elements") from error


class _Cells:
    """A flag for each cell of a tensor: elements side by side that no run tells apart.

    A cell is as large as the runs allow, so experts of any size cost a flag each. Only runs that
    interleave single elements cost one byte an element, while they are checked.
    """

    def __init__(self, numel: int, runs: Sequence[Slice]) -> None:
        spans = (number for run in runs for number in (run.offset, *run.stride[:-1], _inner(run)))
        self.num_elements = max(gcd(numel, *spans), 1)
        self.cells = torch.zeros(numel // self.num_elements, dtype=torch.bool)

    def of(self, run: Slice) -> torch.Tensor:
        """The flags of a run."""
        size, inner = self.num_elements, _inner(run)
        is_strided = bool(run.stride) and run.stride[-1] != 1  # then a cell is one element
        shape = run.shape if is_strided else (*run.shape[:-1], inner // size)
        stride = run.stride if is_strided else (*(step // size for step in run.stride[:-1]), 1)
        return self.cells.as_strided(shape, stride, run.offset // size)


def _inner(run: Slice) -> int:
    """Elements side by side in a run."""
    return run.shape[-1] if run.stride and run.stride[-1] == 1 else 1


def _incomplete(
    tensor_name: str,
    shape: Sequence[int],
    views: Sequence[NamedView],
    runs: Sequence[Slice],
    seen: _Cells,
) -> str:
    expected = (
        f"{tensor_name} {list(shape)}: expected each of its elements under one checkpoint name"
    )
    if not seen.cells.all():
        first = int(seen.cells.view(torch.uint8).argmin()) * seen.num_elements
        steps = zip(shape, contiguous_stride(shape), strict=True)
        index = [first // step % extent for extent, step in steps]
        return f"element {index} of {expected}, found it under none of {len(views)}; map it"
    seen.cells.fill_(False)
    for named, run in zip(views, runs, strict=True):
        flags, before = seen.of(run), int(seen.cells.sum())
        flags.fill_(True)
        if (int(seen.cells.sum()) - before) * seen.num_elements != run.numel:
            return f"{named.name} repeats elements of {expected}; check the views before it"
    raise AssertionError("views that repeat nothing and leave nothing out are complete")
