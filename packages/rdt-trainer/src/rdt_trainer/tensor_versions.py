"""Tells whether tensors were changed in place since they were noted, without keeping them alive."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from rdt_trainer.errors import SourceError

__all__ = ["TensorVersions"]

MAX_NAMES = 4  # of changed tensors in a message


class TensorVersions:
    """The version counters of what a pass yielded; used by one thread.

    Torch counts a tensor's in-place changes, in a counter that its views and detached aliases
    share. What bypasses torch's operators (numpy, ``tensor.data``) is not counted, and inference
    tensors have no counter.

    Args:
        rank: the trainer rank, for messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._noted: list[tuple[str, torch.Tensor, int]] = []
        self._standing: Mapping[str, torch.Tensor] = {}
        self._standing_versions: list[int] = []

    def note(self, name: str, tensor: torch.Tensor, *, keep: bool = False) -> None:
        """Remember the tensor's present version.

        ``keep``: its memory stays anyway, so it may be kept, which costs a tenth.
        """
        if tensor.is_inference():
            return
        if keep:
            self._noted.append((name, tensor, tensor._version))
            return
        with torch.inference_mode(False):
            # An alias that has swapped its memory for none: it shares the counter, and nothing is
            # resident for longer because of it.
            counter = tensor.detach()
            counter.data = tensor.new_empty(0)
        self._noted.append((name, counter, tensor._version))

    def note_standing(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Remember the present versions of tensors, by name, whose memory stays anyway.

        Once, for all of them; `__len__` does not count them. The mapping is kept.
        """
        try:
            versions = [tensor._version for tensor in tensors.values()]
        except RuntimeError:  # of an inference tensor
            tensors = {name: each for name, each in tensors.items() if not each.is_inference()}
            versions = [tensor._version for tensor in tensors.values()]
        self._standing, self._standing_versions = tensors, versions

    def __len__(self) -> int:
        return len(self._noted)

    def check(self, start: int = 0) -> None:
        """Raises `SourceError` when a tensor changed; those noted before ``start`` are skipped.

        The standing ones are `check_standing`'s.
        """
        self._refuse(list(self._changed(start)))

    def check_standing(self) -> None:
        """Raises `SourceError` when a standing tensor changed."""
        found = [tensor._version for tensor in self._standing.values()]
        if found != self._standing_versions:
            pairs = zip(self._standing, found, self._standing_versions, strict=True)
            self._refuse([name for name, version, noted in pairs if version != noted])

    def _refuse(self, changed: Sequence[str]) -> None:
        if changed:
            names = ", ".join(changed[:MAX_NAMES])
            if len(changed) > MAX_NAMES:
                names += f" and {len(changed) - MAX_NAMES} more"
            raise SourceError(
                f"rank {self._rank}: {names} changed in place after the source yielded it, so "
                "other bytes than its own may have been sent: expected no optimizer step during "
                "send_weights() and no buffer yielded twice; yield tensors that stay unchanged "
                "until send_weights returns"
            )

    def _changed(self, start: int) -> Iterator[str]:
        for name, counter, version in self._noted[start:]:
            if counter._version != version:
                yield name
