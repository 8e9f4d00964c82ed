"""The raw logits of a model, copied where the worker computes them."""

import hashlib
from typing import Any

import torch
from torch import nn

from rdt_vllm.testing.bits import first_difference, num_bytes, to_bytes
from rdt_vllm.testing.report import Mismatch
from rdt_vllm.testing.tensor_comparison import differ

__all__ = ["LogitsTap", "compare_logits"]


class LogitsTap:
    """Copies what ``model.compute_logits`` returns, call by call, between `attach` and `detach`.

    Of the workers that share a vocabulary some return nothing; they record nothing.

    Attributes:
        logits: one CPU tensor a call, ``(tokens, vocabulary)`` in the model's dtype.
    """

    def __init__(self, model: nn.Module) -> None:
        self.logits: list[torch.Tensor] = []
        self._model = model

    def attach(self) -> None:
        compute: Any = self._model.compute_logits

        def copying(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute(*args, **kwargs)
            if logits is not None:
                self.logits.append(logits.detach().to("cpu", copy=True))
            return logits

        self._model.__dict__["compute_logits"] = copying

    def detach(self) -> None:
        self._model.__dict__.pop("compute_logits", None)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(logits) for logits in self.logits)

    def digest(self) -> str:
        """SHA-256 over all recorded bytes; empty when there are none."""
        if not self.logits:
            return ""
        sha = hashlib.sha256()
        for logits in self.logits:
            sha.update(to_bytes(logits).numpy().tobytes())
        return sha.hexdigest()


def compare_logits(found: LogitsTap, expected: LogitsTap) -> list[Mismatch]:
    """Bit for bit and call by call; offsets count from the beginning of that call's logits."""
    if len(found.logits) != len(expected.logits):
        reason = f"expected logits of {len(expected.logits)} calls, found {len(found.logits)}"
        return [Mismatch("logits", None, reason)]
    mismatches = []
    for call, (left, right) in enumerate(zip(found.logits, expected.logits, strict=True)):
        path = f"logits[{call}]"
        if left.shape != right.shape or left.dtype != right.dtype:
            mismatches.append(
                Mismatch(
                    path,
                    None,
                    f"expected {tuple(right.shape)} {right.dtype}, found "
                    f"{tuple(left.shape)} {left.dtype}",
                )
            )
        elif (first := first_difference(left, right)) is not None:
            mismatches.append(Mismatch(path, first, differ(left, right)))
    return mismatches
