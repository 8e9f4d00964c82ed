"""Arenas: the one allocation behind a ring of slots, made once and registered once."""

import torch

from rdt_transport.errors import WireError
from rdt_transport.wire.base import Region

__all__ = ["Arena"]


class Arena:
    """``num_slots`` slots of ``slot_bytes`` bytes each, in one uint8 tensor; never resized.

    Slots start at multiples of `ALIGNMENT` bytes from the buffer's start.

    Args:
        num_slots: at least 1.
        slot_bytes: at least 1.
        device: where the memory is allocated.

    Attributes:
        buffer: uint8, 1-D; what a wire registers.

    Raises:
        WireError: a count below 1, or no memory left on the device.
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
        try:
            self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch's out-of-memory errors, of every device
            raise WireError(
                f"no room for {num_slots} slots of {slot_bytes} bytes ({num_bytes} bytes) on "
                f"{device}; lower num_slots or max_chunk_bytes"
            ) from error

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
