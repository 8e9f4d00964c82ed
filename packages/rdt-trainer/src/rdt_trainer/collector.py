"""From a source's stream of named tensors to whole gather groups, checked against the manifest."""

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Self

import torch

from rdt_plan import Manifest, ParamMeta
from rdt_trainer.errors import SourceError
from rdt_trainer.source import AdaptedSource
from rdt_trainer.tensor_versions import TensorVersions
from rdt_transport.pack import torch_dtype

__all__ = ["GroupCollector"]

_torch_dtype = cache(torch_dtype)


class GroupCollector:
    """Takes one pass over a source apart, group by group; used by one thread.

    Args:
        manifest: what the source declared.
        rank: whose owned parameters the pass yields.
        tensors: the pass, as `WeightSource.iter_full` started it.
        device: where they must be.
        stable: names of tensors whose memory stays anyway.
        standing: tensors, by name, that are not in the pass: there already, unchanged from now on.

    Attributes:
        standing: as given.
    """

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        tensors: Iterator[tuple[str, torch.Tensor]],
        device: torch.device,
        stable: Collection[str] = (),
        standing: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._manifest = manifest
        self._rank = rank
        self._tensors = tensors
        self._device = device
        self._stable = stable
        self.standing = standing or {}
        self._num_taken = 0
        self._has_end = True  # an end that may still be asked for
        self._versions = TensorVersions(rank)
        self._versions.note_standing(self.standing)
        self._num_published = 0

    @classmethod
    def of(cls, source: AdaptedSource, manifest: Manifest, rank: int, device: torch.device) -> Self:
        """Start a pass over ``source``: without its stable tensors, where it may do without them.

        Raises `SourceError` when these are others by name than when the source was adapted.
        """
        if (passes := source.passes) is None:
            stable = source.stable.keys()
            return cls(manifest, rank, iter(source.iter_full()), device, stable)
        standing = passes.stable_tensors()
        if standing.keys() != source.stable.keys():
            name = min(standing.keys() ^ source.stable.keys())
            raise SourceError(
                f"rank {rank}: {name} is {'' if name in standing else 'no longer '}among the "
                "source's stable tensors: expected the names it had when the trainer was "
                "initialised, as workers read the registered memory of each; make a new trainer"
            )
        rest = iter(passes.iter_rest(standing.keys()))
        return cls(manifest, rank, rest, device, standing=standing)

    def collect(self, group: int) -> dict[str, torch.Tensor]:
        """The owned tensors of the next group, detached.

        Groups are asked for in manifest order. Raises `SourceError` when the pass ends early or
        yields another name, shape, dtype or kind of tensor than declared, or one that is on another
        device, or when a tensor of the group before was changed in place; whatever the source
        itself raises passes through.
        """
        collected, before = {}, self._num_published
        self._num_published = len(self._versions)
        for name in self._manifest.groups[group].names:
            meta = self._manifest.by_name[name]
            if name in self.standing:
                collected[name] = self.standing[name].detach()
            elif self._rank in meta.owners:
                collected[name] = self._next(meta)
        self._versions.check(before)
        return collected

    def finish(self) -> None:
        """Run the pass to its end.

        Raises `SourceError` when it yields anything more, or when it changed a tensor of the last
        group, or a standing one, in place.
        """
        self._has_end = False
        for name, _ in self._tensors:
            raise SourceError(
                f"rank {self._rank}: the source yielded {name} after its last declared parameter: "
                f"expected the end of the pass; list it in metadata, or do not yield it"
            )
        self._versions.check(self._num_published)
        if self._num_taken:  # else nothing has run since they were noted
            self._versions.check_standing()

    def check_unchanged(self) -> None:
        """Raises `SourceError` when a tensor was changed in place since it was collected."""
        self._versions.check()
        self._versions.check_standing()

    def discard(self) -> None:
        """Iterate what is left of the pass, so that every rank runs the same collectives.

        No further than the names left and the end, as a pass may never end.
        """
        owned = (p.name for p in self._manifest.params if self._rank in p.owners)
        num_left = sum(name not in self.standing for name in owned) - self._num_taken
        for _ in islice(self._tensors, num_left + self._has_end):
            pass

    def _next(self, meta: ParamMeta) -> torch.Tensor:
        item = next(self._tensors, None)
        if item is None:
            raise SourceError(
                f"rank {self._rank}: the source's pass ended before {meta.name}: expected every "
                "parameter this rank owns, in metadata order; yield it, or declare other owners"
            )
        name, tensor = item
        if name != meta.name:
            known = any(name == param.name for param in self._manifest.params)
            raise SourceError(
                f"rank {self._rank}: the source yielded {name}, expected {meta.name}: "
                + (
                    "yield parameters in metadata order, each that this rank owns once"
                    if known
                    else f"{name} is not in metadata; list it there, or do not yield it"
                )
            )
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise SourceError(
                f"rank {self._rank}: {name} is a {type(tensor).__name__}: expected a plain, whole "
                "tensor; call full_tensor() on a DTensor"
            )
        if tensor.device != self._device:
            raise SourceError(
                f"rank {self._rank}: {name} is on {tensor.device}: expected a tensor on "
                f"{self._device}, where this rank serves from; yield "
                f"tensor.to({str(self._device)!r}) from iter_full, or make the RdtTrainer with "
                f"device={str(tensor.device)!r}"
            )
        if tensor.dtype != _torch_dtype(meta.dtype) or tensor.shape != meta.shape:
            found = str(tensor.dtype).removeprefix("torch.")
            raise SourceError(
                f"rank {self._rank}: {name} is {found}{list(tensor.shape)}, expected "
                f"{meta.dtype}{list(meta.shape)} as metadata declared at init; yield it so, or "
                "make a new trainer for a model that changed"
            )
        self._num_taken += 1
        self._versions.note(name, tensor, keep=name in self._stable)
        return tensor.detach() if tensor.requires_grad else tensor
