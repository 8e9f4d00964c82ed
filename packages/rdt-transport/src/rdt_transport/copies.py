"""Copy tables: many strided copies between the same places, made again and again.

On a GPU with Triton a table is a few launches, whatever its length; elsewhere it is one
`torch._foreach_copy_` over views.
"""

from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import Protocol

import torch
from torch import Tensor

from rdt_plan import SliceError
from rdt_transport.copy_blocks import WIDEST, Block, Copy, blocks_of, extent_bytes
from rdt_transport.copy_tiles import Tiling

__all__ = ["Copy", "CopyTable"]

_UNITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""By width, a dtype whose copies move bits."""


class _Mover(Protocol):
    """Makes the copies of some blocks, on the current stream of the table's device."""

    def run(self, bases: Sequence[Tensor], addresses: Sequence[int]) -> None: ...


class CopyTable:
    """Copies between base tensors, all of them made by each `run`.

    Bases are known by index until then. Everything that does not change with them is worked out
    once; new bases whose addresses are aligned as the last ones' were cost one small upload.
    Not thread-safe: one thread at a time calls `run`.

    Args:
        copies: in any order; no byte is written twice.
        device: of every base.
        source_names, target_names: of the bases, for messages.
        kernels: whether to use Triton's kernels; None: on a GPU, where Triton is installed. On a
            CPU they need Triton's interpreter.
        tiling: how kernels cut the work.

    Attributes:
        num_bytes: that one `run` writes.

    Raises:
        SliceError: a copy contradicts itself.
    """

    def __init__(
        self,
        copies: Iterable[Copy],
        device: torch.device | str,
        *,
        source_names: Sequence[str] = (),
        target_names: Sequence[str] = (),
        kernels: bool | None = None,
        tiling: Tiling | None = None,
    ) -> None:
        self._device = _indexed(torch.device(device))
        self._kernels = False if kernels is None and self._device.type != "cuda" else kernels
        self._tiling = tiling or Tiling()
        self._source_names, self._target_names = source_names, target_names
        self._copies = [copy for copy in copies if blocks_of(copy, 0, 0)]
        self._source_bytes: dict[int, int] = {}
        self._target_bytes: dict[int, int] = {}
        for copy in self._copies:
            read = extent_bytes(copy.shape, copy.source_strides, copy.item_bytes)
            written = extent_bytes(copy.shape, copy.target_strides, copy.item_bytes)
            _widen(self._source_bytes, copy.source, copy.source_offset + read)
            _widen(self._target_bytes, copy.target, copy.target_offset + written)
        self._num_sources = 1 + max(self._source_bytes, default=-1)
        self._num_targets = 1 + max(self._target_bytes, default=-1)
        self.num_bytes = sum(prod(copy.shape) * copy.item_bytes for copy in self._copies)
        self._addresses: list[int] = []
        self._residues: list[int] = []
        self._mover: _Mover | None = None

    def prepare(self) -> None:
        """Get ready what the first `run` would, kernels included, for bases that are aligned."""
        if self._copies and self._kernels is not False and self._mover is None:
            self._residues = [0] * (self._num_sources + self._num_targets)
            self._mover = self._made(self._residues)

    def run(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Enqueue all copies on the current stream.

        A base counts from its first element to its storage's end, whatever its shape, strides and
        dtype are. The caller keeps all bases alive until that work is done.

        Raises:
            SliceError: a base is missing, too small, or on another device. Nothing is enqueued.
        """
        if len(sources) < self._num_sources or len(targets) < self._num_targets:
            raise SliceError(
                f"expected {self._num_sources} sources and {self._num_targets} targets, found "
                f"{len(sources)} and {len(targets)}"
            )
        if not self._copies:
            return
        bases = [*sources[: self._num_sources], *targets[: self._num_targets]]
        with torch._C.DisableTorchFunctionSubclass():  # parameters of a class ask Python each time
            self._run(bases)

    def _run(self, bases: Sequence[Tensor]) -> None:
        addresses = [base.data_ptr() for base in bases]
        if self._mover is None or addresses != self._addresses:
            sources, targets = bases[: self._num_sources], bases[self._num_sources :]
            self._check(sources, self._source_bytes, self._source_names or "source")
            self._check(targets, self._target_bytes, self._target_names or "target")
            residues = [address % WIDEST for address in addresses]
            if self._mover is None or residues != self._residues:
                self._mover, self._residues = self._made(residues), residues
            self._addresses = addresses
        self._mover.run(bases, addresses)

    def _check(
        self, bases: Sequence[Tensor], needed: dict[int, int], names: Sequence[str] | str
    ) -> None:
        for index, count in needed.items():
            base = bases[index]
            # The storage says what there is: FSDP empties those of tensors that keep their shapes.
            held = base.untyped_storage().nbytes() - _start(base)
            if held < count or base.device != self._device:
                name = f"{names} {index}" if isinstance(names, str) else names[index]
                raise SliceError(
                    f"{name}: expected at least {count} bytes on {self._device}, found "
                    f"{held} on {base.device}"
                )

    def _made(self, residues: Sequence[int]) -> _Mover:
        blocks = []
        for copy in self._copies:
            target = self._num_sources + copy.target  # among all bases
            found = blocks_of(copy, residues[copy.source], residues[target])
            blocks += [block._replace(target=target) for block in found]
        if self._kernels is not False:
            try:
                from rdt_transport.triton_copies import TritonCopies
            except ImportError:
                if self._kernels:
                    raise
            else:
                return TritonCopies(blocks, self._device, self._tiling)
        return _ViewCopies(blocks)


class _ViewCopies:
    """The plain path. Views are made anew each time: kept ones would keep the bases' memory."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks

    def run(self, bases: Sequence[Tensor], addresses: Sequence[int]) -> None:
        starts = [_start(base) for base in bases]
        memories = [_Memory(base) for base in bases]
        sources, targets = [], []
        for block in self._blocks:
            read = starts[block.source] + block.source_offset
            written = starts[block.target] + block.target_offset
            width = gcd(block.width, read, written)  # storages may start unaligned, too
            shape = [axis.extent for axis in block.axes]
            source_strides = [axis.source // width for axis in block.axes]
            target_strides = [axis.target // width for axis in block.axes]
            if block.run_bytes != width or not shape:
                shape.append(block.run_bytes // width)
                source_strides.append(1)
                target_strides.append(1)
            source, target = memories[block.source][width], memories[block.target][width]
            sources.append(source.as_strided(shape, source_strides, read // width))
            targets.append(target.as_strided(shape, target_strides, written // width))
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


class _Memory(dict[int, Tensor]):
    """By width, a base's whole storage in units of it."""

    def __init__(self, base: Tensor) -> None:
        self._storage = base.untyped_storage()
        self._device = base.device

    def __missing__(self, width: int) -> Tensor:
        whole = torch.empty(0, dtype=_UNITS[width], device=self._device)
        shape = (self._storage.nbytes() // width,)
        self[width] = whole.set_(self._storage, 0, shape, (1,))
        return self[width]


def _start(base: Tensor) -> int:
    """The byte of its storage that ``base`` starts at."""
    return int(base.storage_offset()) * base.element_size()


def _indexed(device: torch.device) -> torch.device:
    """``device`` as its tensors name it: the current one of its kind when it has no index."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _widen(needed: dict[int, int], index: int, count: int) -> None:
    needed[index] = max(needed.get(index, 0), count)
