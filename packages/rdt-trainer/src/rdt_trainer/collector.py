"""From a source's stream of named tensors to whole gather groups, checked against the manifest."""

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Self

import torch

from rdt_plan import Manifest, ParamMeta
from rdt_trainer.errors import SourceError
from rdt_trainer.module_snapshot import gentle_looks
from rdt_trainer.source import AdaptedSource, NamedTensors, StablePasses
from rdt_trainer.tensor_versions import TensorVersions
from rdt_transport.pack import torch_dtype

__all__ = ["GroupCollector"]

_torch_dtype = cache(torch_dtype)


class GroupCollector:
    """Takes one pass over a source apart, group by group; used by one thread.

    Args:
        manifest: what the source declared.
        rank: whose owned parameters the pass yields.
        tensors: the pass, as the source started it: whole tensors, or this rank's pieces.
        device: where they must be.
        stable: names of tensors whose memory stays anyway.
        standing: tensors, by name, that are not in the pass: there already, unchanged from now on.
        passes: says in `confirm` whether those still are, and starts the pass without them.

    Attributes:
        standing: as given, or as confirmed.
    """

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        tensors: Iterator[tuple[str, torch.Tensor]],
        device: torch.device,
        stable: Collection[str] = (),
        standing: Mapping[str, torch.Tensor] | None = None,
        passes: StablePasses | None = None,
    ) -> None:
        self._manifest = manifest
        self._rank = rank
        self._tensors = self._without_empty_pieces(tensors)
        self._device = device
        self._stable = stable
        self.standing = standing or {}
        self._unconfirmed = passes
        self._num_taken = 0
        self._has_end = True  # an end that may still be asked for
        self._versions = TensorVersions(rank)
        self._versions.note_standing(self.standing)
        self._num_published = 0

    @classmethod
    def of(cls, source: AdaptedSource, manifest: Manifest, rank: int, device: torch.device) -> Self:
        """A pass over ``source``: without its stable tensors, where it may do without them.

        Those are then the registered ones, until `confirm`: looking at each of them takes a while,
        in which workers may read them.
        """
        if source.passes is None:
            stable = source.stable.keys()
            return cls(manifest, rank, iter(source.new_pass()), device, stable)
        if source.fill is not None:
            source.fill()
        return cls(manifest, rank, iter(()), device, standing=source.stable, passes=source.passes)

    def confirm(self, *, gently: bool = False) -> None:
        """Ask the source for its standing tensors, and start its pass without them.

        ``gently``: in small steps, see `gentle_looks`.

        Before anything is collected, and before the last group is published: no worker may have
        all of a set of which some is no longer the source's. Raises `SourceError` when they are
        others by name; who publishes them sees whether they are elsewhere.
        """
        if self._unconfirmed is None:
            return
        passes, known = self._unconfirmed, self.standing
        with gentle_looks(gently):
            found = passes.stable_tensors()
        if found.keys() != known.keys():
            name = min(found.keys() ^ known.keys())
            raise SourceError(
                f"rank {self._rank}: {name} is {'' if name in found else 'no longer '}among the "
                "source's stable tensors: expected the names it had when the trainer was "
                "initialised, as workers read the registered memory of each; make a new trainer"
            )
        self._start(passes)
        if found is not known:
            self._versions.check_standing()
            self.standing = found
            self._versions.note_standing(found)

    def _start(self, passes: StablePasses) -> None:
        self._unconfirmed = None
        rest = iter(passes.iter_rest(self.standing.keys()))
        self._tensors = self._without_empty_pieces(rest)

    def collect(self, group: int) -> dict[str, torch.Tensor]:
        """What this rank holds of the next group, detached.

        Groups are asked for in manifest order. Raises `SourceError` when the pass ends early or
        yields another name, shape, dtype or kind of tensor than declared, or one that is on another
        device, or when a tensor of the group before was changed in place; whatever the source
        itself raises passes through.
        """
        collected, before = {}, self._num_published
        self._num_published = len(self._versions)
        for name in self._manifest.groups[group].names:
            if name in self.standing:
                collected[name] = self.standing[name].detach()
            elif (held := self._manifest.by_name[name].held_by(self._rank)) is not None:
                collected[name] = self._next(held)
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
        if self._unconfirmed is not None:
            self.standing = self._unconfirmed.stable_tensors()  # which starts a pass
            self._start(self._unconfirmed)
        held = (p.name for p in self._manifest.params if p.held_by(self._rank) is not None)
        num_left = sum(name not in self.standing for name in held) - self._num_taken
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
                "tensor; call full_tensor() on a DTensor, or to_local() in iter_local"
            )
        if tensor.device != self._device:
            raise SourceError(
                f"rank {self._rank}: {name} is on {tensor.device}: expected a tensor on "
                f"{self._device}, where this rank serves from; yield "
                f"tensor.to({str(self._device)!r}), or make the RdtTrainer with "
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

    def _without_empty_pieces(self, tensors: NamedTensors) -> NamedTensors:
        """The pass without what has no elements here, and so belongs to no group of this rank."""
        return filter(self._is_of_a_group, tensors)  # a generator would keep the last tensor alive

    def _is_of_a_group(self, item: tuple[str, torch.Tensor]) -> bool:
        name, tensor = item
        meta = self._manifest.by_name.get(name)
        if tensor.numel() or meta is None or not meta.mesh_shape:
            return True
        return meta.held_by(self._rank) is not None
