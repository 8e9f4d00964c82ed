"""What each storage stands for while a loader runs."""

from typing import Any

import torch
from torch import Tensor

from rdt_bake.destinations import DestinationStorage
from rdt_bake.frames import loader_line
from rdt_bake.origins import Computed, Constant, Copied, Origin, Source
from rdt_bake.own_tensors import OwnTensors
from rdt_bake.tensors import first_element, tensors_in
from rdt_bake.twins import MetaTwins
from rdt_plan import ParamMeta

__all__ = ["Storages"]

_aten = torch.ops.aten
_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default})


class Storages:
    """What the live storages of one recording stand for; used while the model holds its twins.

    Attributes:
        origins: what each stands for, by key.
        sources: by name.
        own_tensors: the loader's own real ones; these stand for nothing yet.
        current: the weight handed out last.
    """

    def __init__(self, twins: MetaTwins) -> None:
        self.origins: dict[int, Origin] = dict(twins.storages)
        self.sources: dict[str, Source] = {}
        self.own_tensors = OwnTensors()
        self.current: str | None = None
        self._alive: list[Any] = []  # a storage's key is used again once it is freed

    def assign(self, tensor: Tensor, origin: Origin) -> None:
        """Says what the tensor's storage stands for from now on, and keeps it alive."""
        storage = tensor.untyped_storage()
        self.origins[storage._cdata] = origin
        self._alive.append(storage)

    def add_source(self, meta: ParamMeta, tensor: Tensor) -> None:
        """Says that the tensor is the whole source that ``meta`` describes."""
        source = self.sources[meta.name] = Source(meta.name, meta)
        self.assign(tensor, source)

    def origin(self, tensor: Tensor) -> Origin | None:
        """What the tensor's storage stands for; None for a stranger's."""
        if tensor.layout is not torch.strided:
            return None
        return self.origins.get(tensor.untyped_storage()._cdata)

    def keyed(self, *values: Any) -> list[tuple[Tensor, Origin]]:
        """The tensors among ``values`` that stand for something."""
        found = ((tensor, self.origin(tensor)) for tensor in tensors_in(values))
        return [(tensor, origin) for tensor, origin in found if origin is not None]

    def is_constant(self, origin: Origin | None) -> bool:
        """Whether it is a real buffer or attribute that nothing landed in: its values are known."""
        return (
            type(origin) is DestinationStorage
            and origin.is_real
            and not origin.written
            and origin.destinations[0].kind != "parameter"  # those come first
        )

    def real(self, value: Any) -> Any:
        """``value`` with twins of constants replaced by the model's own values, now read."""
        if isinstance(value, Tensor):
            origin = self.origin(value)
            if type(origin) is not DestinationStorage or not self.is_constant(origin):
                return value
            return self.real_view(value, origin)
        if isinstance(value, dict):
            return {key: self.real(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.real, value))
        return value

    def real_view(self, value: Tensor, origin: DestinationStorage) -> Tensor:
        """The model's own values, now read, that ``value`` sees of ``origin``, a constant."""
        origin.read_at = origin.read_at or loader_line()
        if not value.is_meta:
            return value
        original = origin.destinations[0].original
        offset, shape, stride = first_element(value), value.shape, value.stride()
        if type(original) is Tensor and original.dtype == value.dtype:
            return original.as_strided(shape, stride, offset)
        return torch.empty(0, dtype=value.dtype, device=original.device).set_(
            original.untyped_storage(), offset, shape, stride
        )

    def on_meta(self, func: Any, value: Any) -> Any:
        """``value`` with meta tensors for real ones, but for masks, whose values make a shape."""
        if isinstance(value, Tensor):
            value = self.real(value)
            origin, is_mask = self.origin(value), func in _INDEXING and value.dtype == torch.bool
            is_known = origin is None or self.is_constant(origin)
            if value.is_meta or (is_mask and is_known):
                return value
            meta = torch.empty(0, dtype=value.dtype, device="meta")
            return meta.set_(
                meta.untyped_storage(), first_element(value), value.shape, value.stride()
            )
        if isinstance(value, dict):
            return {key: self.on_meta(func, item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.on_meta(func, item) for item in value])
        return value

    def weight_of(self, inputs: list[tuple[Tensor, Origin]]) -> str | None:
        """The source that values made from ``inputs`` come from, or else the current weight."""
        for _, origin in inputs:
            if isinstance(origin, (Source, Copied)):
                return origin.name
            if type(origin) is Computed and origin.derived:
                return origin.weight
        return self.current

    def is_derived(self, inputs: list[tuple[Tensor, Origin]]) -> bool:
        """Whether values made from ``inputs`` may depend on a source."""
        return any(
            origin.derived
            if type(origin) is Computed
            else type(origin) is not Constant and not self.is_constant(origin)
            for _, origin in inputs
        )
