"""Arenas: the one allocation behind a ring of slots, made once and registered once."""

import contextlib
import mmap

import torch

from rdt_transport.device_memory import VIRTUAL_MEMORY_REMEDY, is_registrable
from rdt_transport.errors import WireError
from rdt_transport.events import free_device_bytes
from rdt_transport.host_memory import free_host_bytes
from rdt_transport.wire.base import Region

__all__ = ["Arena"]


class Arena:
    """``num_slots`` slots of ``slot_bytes`` bytes each, in one uint8 tensor; never resized.

    Slots start at multiples of `ALIGNMENT` bytes from the buffer's start. CPU memory lies in huge
    pages where the kernel has them, and is touched here: what is not there is missed now and not
    while weights arrive, and the first sync takes no page faults. Memory of a GPU is one
    allocation of torch's.

    Args:
        num_slots: at least 1.
        slot_bytes: at least 1.
        device: where the memory is allocated.

    Attributes:
        buffer: uint8, 1-D; what a wire registers.

    Raises:
        WireError: a count below 1, less memory free on the device (says what to lower), or memory
            that cannot be registered.
    """

    ALIGNMENT = 256

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device | str = "cpu") -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise WireError(
                f"an arena needs slots and bytes, found {num_slots} slots of {slot_bytes} bytes"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._step_bytes = -(-slot_bytes // self.ALIGNMENT) * self.ALIGNMENT
        num_bytes = num_slots * self._step_bytes
        on_host = torch.device(device).type == "cpu"
        free_bytes = free_host_bytes() if on_host else free_device_bytes(device)
        no_room = (
            f"no room for {num_slots} slots of {slot_bytes} bytes ({num_bytes} bytes) on {device}"
            f"{'' if free_bytes is None else f', where {free_bytes} bytes are free'}; "
            "lower num_slots or max_chunk_bytes"
        )
        if free_bytes is not None and num_bytes > free_bytes:
            raise WireError(no_room)
        try:
            self.buffer = _touched_pages(num_bytes) if on_host else _idle_bytes(num_bytes, device)
        except (RuntimeError, OSError, OverflowError) as error:  # torch's of any device, mmap's
            raise WireError(no_room) from error
        if not is_registrable(self.buffer):
            raise WireError(
                f"{num_slots} slots of {slot_bytes} bytes on {device} lie in virtual memory, which "
                f"cannot be registered; {VIRTUAL_MEMORY_REMEDY}"
            )

    def slot(self, index: int) -> torch.Tensor:
        """Slot ``index`` as uint8, 1-D, ``slot_bytes`` long; a view."""
        start = self._start(index)
        return self.buffer[start : start + self.slot_bytes]

    def region(self, index: int) -> Region:
        """Slot ``index`` as a wire addresses it."""
        return Region(
            self.buffer.data_ptr() + self._start(index),
            self.slot_bytes,
            self.buffer.device.index or 0,
        )

    def _start(self, index: int) -> int:
        if not 0 <= index < self.num_slots:
            raise WireError(f"slot {index} of an arena of {self.num_slots} slots")
        return index * self._step_bytes


def _idle_bytes(num_bytes: int, device: torch.device | str) -> torch.Tensor:
    """Memory of a GPU that nothing enqueued before still touches: a peer writes into it, or we do
    on another stream, and torch may have taken it from what was freed only just now."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    buffer[:1].item()  # waits for the stream that torch took it on
    return buffer


def _touched_pages(num_bytes: int) -> torch.Tensor:
    """Zeros of the host, in huge pages if the kernel grants them: copies then miss fewer of them,
    and a read through the kernel looks fewer of them up."""
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).zero_()
