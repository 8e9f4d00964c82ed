"""A torch module as a weight source: parameters whole, sharded ones gathered."""

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

import torch

from rdt_trainer.named_module import NamedModule
from rdt_trainer.served import Whole, is_member
from rdt_trainer.source import SourceMeta

__all__ = ["ModuleSource"]


class ModuleSource(NamedModule):
    """Serves the parameters of any ``nn.Module`` whole; a `WeightSource`.

    Arguments and errors as of `NamedModule`. Each pass yields tensors detached, contiguous and
    whole, in metadata order: the ranks of a ``DTensor``'s mesh gather it together (FSDP2, tensor
    parallelism), one parameter at a time, cast before that. `ShardedModuleSource` gathers nothing.

    A view that is contiguous is served from the parameter's own memory, any other is copied in
    every pass. A tensor is gathered once a pass, and kept until its last view is yielded: keep its
    views within one gather group.
    """

    @cached_property
    def metadata(self) -> list[SourceMeta]:
        """Every checkpoint name, group by group; described once, without gathering anything."""
        return [
            SourceMeta(
                name,
                served.dtype,
                served.tensor_shape if served.region is None else served.region.shape,
                tuple(sorted(self._meshes[name].ranks)) if name in self._meshes else None,
            )
            for name, served in self._served.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the parameters this rank holds; see `WeightSource.iter_full`."""
        return self._iter(())

    def iter_rest(self, stable: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the other names; see `StablePasses`."""
        if len(stable) < len(self._served):
            yield from self._iter(stable)

    def _stable_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is served from a parameter's own memory: neither cast, copied nor gathered."""
        return {
            name: served.part(tensors[served.tensor_name].detach())
            for name, served in self._served.items()
            if served.is_stable(tensors[served.tensor_name])
        }

    def _iter(self, left_out: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._checked_tensors()
        if left_out:
            self._check_standing(tensors)
        held: dict[Whole, torch.Tensor] = {}
        for name, served in self._served.items():
            if name in left_out:
                continue
            tensor = tensors[served.tensor_name]
            if served.needs_no_gather(tensor):  # most of a model's many tensors
                yield name, served.part(tensor.detach())
            elif is_member(tensor):
                whole = held.pop(served.whole, None)
                if whole is None:
                    whole = served.gathered(tensor)
                if self._last[served.whole] != name:
                    held[served.whole] = whole
                part = served.part(whole)
                del whole  # the last part is the only one left that refers to it
                yield name, part
                del part

    @cached_property
    def _last(self) -> dict[Whole, str]:
        """The last name that each gathered tensor serves."""
        return {served.whole: name for name, served in self._served.items()}
