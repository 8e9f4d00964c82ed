"""From a source's stream of named tensors to whole gather groups, checked against the manifest."""

from collections.abc import Iterator

import torch

from rdt_plan import Manifest, ParamMeta
from rdt_trainer.errors import SourceError

__all__ = ["GroupCollector"]


class GroupCollector:
    """Takes one pass over a source apart, group by group; used by one thread.

    Args:
        manifest: what the source declared.
        rank: whose owned parameters the pass yields.
        tensors: the pass, as `WeightSource.iter_full` started it.
    """

    def __init__(
        self, manifest: Manifest, rank: int, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        self._manifest = manifest
        self._rank = rank
        self._tensors = tensors

    def collect(self, group: int) -> dict[str, torch.Tensor]:
        """The owned tensors of the next group, detached.

        Groups are asked for in manifest order. Raises `SourceError` when the pass ends early or
        yields another name, shape, dtype or kind of tensor than declared; whatever the source
        itself raises passes through.
        """
        collected = {}
        for name in self._manifest.groups[group].names:
            meta = self._manifest.param(name)
            if self._rank in meta.owners:
                collected[name] = self._next(meta)
        return collected

    def finish(self) -> None:
        """Run the pass to its end; raises `SourceError` when it yields anything more."""
        for name, _ in self._tensors:
            raise SourceError(
                f"rank {self._rank}: the source yielded {name} after its last declared parameter: "
                f"expected the end of the pass; list it in metadata, or do not yield it"
            )

    def _next(self, meta: ParamMeta) -> torch.Tensor:
        item = next(self._tensors, None)
        if item is None:
            raise SourceError(
                f"rank {self._rank}: the source's pass ended before {meta.name}: expected every "
                "parameter this rank owns, in metadata order"
            )
        name, tensor = item
        if name != meta.name:
            known = any(name == param.name for param in self._manifest.params)
            raise SourceError(
                f"rank {self._rank}: the source yielded {name}, expected {meta.name}: "
                + (
                    "yield parameters in metadata order, each that this rank owns once"
                    if known
                    else f"{name} is not in metadata"
                )
            )
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise SourceError(
                f"rank {self._rank}: {name} is a {type(tensor).__name__}: expected a plain, whole "
                "tensor; call full_tensor() on a DTensor"
            )
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if found != (meta.dtype, meta.shape):
            raise SourceError(
                f"rank {self._rank}: {name} is {found[0]}{list(found[1])}, expected "
                f"{meta.dtype}{list(meta.shape)} as metadata declares; metadata must hold what "
                "iter_full yields"
            )
        return tensor.detach()
