"""What a running recording knows: what each storage stands for, and what has landed so far."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from rdt_bake.constants import number, uniform_element
from rdt_bake.destinations import DestinationStorage
from rdt_bake.errors import (
    ComputedValueError,
    DataDependentError,
    RecordError,
    UnsupportedTensorError,
)
from rdt_bake.frames import loader_line
from rdt_bake.landings import Landing
from rdt_bake.origins import Computed, Constant, Copied, Origin, Source
from rdt_bake.tensors import first_element, geometry, has_storage, storage_key, tensors_in
from rdt_bake.twins import MetaTwins

__all__ = ["Ledger"]

_NEXT = "only copies of strided regions of a weight, and constants, can be recorded"


class Ledger:
    """The state of one recording; used on one thread, while the model holds its twins.

    Attributes:
        origins: what each live storage stands for, by key.
        landings: all writes into the model, in order.
        consumed: names of the sources that landed.
        current: the weight handed out last.
        refusal: the first error, in case the loader swallows it.
        born: for real tensors the loader makes, which weight was current.
    """

    def __init__(self, twins: MetaTwins) -> None:
        self.origins: dict[int, Origin] = dict(twins.storages)
        self.landings: list[Landing] = []
        self.consumed: set[str] = set()
        self.current: str | None = None
        self.refusal: RecordError | None = None
        self.born: dict[int, str | None] = {}
        self._alive: list[Any] = []  # a storage's key is used again once it is freed

    def assign(self, tensor: Tensor, origin: Origin) -> None:
        """Says what the tensor's storage stands for from now on, and keeps it alive."""
        self.origins[storage_key(tensor)] = origin
        self._alive.append(tensor.untyped_storage())

    def origin(self, tensor: Tensor) -> Origin | None:
        """What the tensor's storage stands for; None for a stranger's."""
        return self.origins.get(storage_key(tensor)) if has_storage(tensor) else None

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
            and all(d.kind != "parameter" for d in origin.destinations)
        )

    def real(self, value: Any) -> Any:
        """``value`` with twins of constants replaced by the model's own values, now read."""
        if isinstance(value, Tensor):
            origin = self.origin(value)
            if type(origin) is not DestinationStorage or not self.is_constant(origin):
                return value
            origin.read_at = loader_line()
            original = origin.destinations[0].original
            if not value.is_meta:
                return value
            return torch.empty(0, dtype=value.dtype, device=original.device).set_(
                original.untyped_storage(), first_element(value), value.shape, value.stride()
            )
        if isinstance(value, dict):
            return {key: self.real(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.real, value))
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

    def refuse(
        self,
        kind: type[RecordError],
        message: str,
        op: Any,
        storage: DestinationStorage | None = None,
        *,
        weight: str | None = None,
        where: str | None = None,
    ) -> NoReturn:
        """Raises ``kind``, naming weight, operation, destination and the loader's line."""
        named = storage.destinations[0] if storage is not None else None
        error = kind(
            message,
            weight=weight or self.current,
            op=str(op),
            where=where or loader_line(),
            module=named.module if named else None,
            param=named.param if named else None,
        )
        self.refusal = self.refusal or error
        raise error

    # -- writes into the model --------------------------------------------------------------------

    def land(self, storage: DestinationStorage, into: Tensor, value: Tensor, op: Any) -> None:
        """Notes that ``value`` is copied ``into`` a view of ``storage``, or refuses it."""
        origin = self.origin(value)
        if isinstance(origin, (Source, Copied)):
            self.consumed.add(origin.name)
        elif type(origin) is Computed and origin.weight and not into.numel():
            self.consumed.add(origin.weight)  # a copy of no elements at all
        if not self.may_land(storage, into, op):
            return
        if not has_storage(value):
            self.refuse(UnsupportedTensorError, f"it is of layout {value.layout}", op, storage)
        if value.shape != into.shape:
            value = value.expand(into.shape)
        if value.is_conj() or value.is_neg():
            self.refuse(UnsupportedTensorError, "it has a conjugate or negative bit", op, storage)
        if type(origin) is Source:
            self.landings.append(Landing.of_source(storage, into, origin.name, value))
        elif type(origin) is Copied:
            self._land_copied(storage, into, value, origin)
        elif type(origin) is Constant:
            element = torch.empty((), dtype=value.dtype).fill_(origin.value)
            self.land_number(storage, into, element)
        elif type(origin) is Computed:
            self.refuse(
                ComputedValueError,
                f"{origin.op} makes a new value, and it lands here; {_NEXT}",
                origin.op,
                storage,
                weight=origin.weight,
                where=origin.where,
            )
        elif origin is storage and geometry(into) == geometry(value):
            return
        elif type(origin) is DestinationStorage and not self.is_constant(origin):
            named = origin.destinations[0]
            self.refuse(
                ComputedValueError,
                f"it is copied from the model's own {named.module}.{named.param}; {_NEXT}",
                op,
                storage,
            )
        else:
            element = uniform_element(self.real(value))
            if element is None:
                self.refuse(
                    ComputedValueError,
                    "a tensor that comes from no weight, and is not one number repeated, lands "
                    f"here; {_NEXT}",
                    op,
                    storage,
                )
            self.land_number(storage, into, element)

    def land_number(self, storage: DestinationStorage, into: Tensor, value: Any) -> None:
        """Notes a fill of the view ``into`` with one number."""
        try:
            element = number(value, into.dtype)
        except UnsupportedTensorError as error:
            self.refuse(UnsupportedTensorError, str(error), "a fill", storage)
        self.landings.append(Landing.of_number(storage, into, self.current, element))

    def may_land(self, storage: DestinationStorage, into: Tensor, op: Any) -> bool:
        """Whether there is anything to write; refuses destinations that cannot be described."""
        if into.numel() == 0:
            return False
        problem = None
        if into.is_conj() or into.is_neg():
            problem = "has a conjugate or negative bit"
        elif any(n > 1 and step == 0 for n, step in zip(into.shape, into.stride(), strict=True)):
            problem = "repeats elements"
        if problem:
            self.refuse(UnsupportedTensorError, f"the destination {problem}", op, storage)
        if storage.read_at is not None:
            self.refuse(
                DataDependentError,
                f"it is written after its values were read at {storage.read_at}, and what was read "
                "changes with every update; read before loading starts",
                op,
                storage,
            )
        storage.written = True
        return True

    def _land_copied(
        self, storage: DestinationStorage, into: Tensor, value: Tensor, origin: Copied
    ) -> None:
        regions = None
        if not origin.is_cast or into.dtype == origin.dtype:
            regions = origin.regions(value.dtype, first_element(value), value.shape, value.stride())
        if regions is None:
            what = "casts" if origin.is_cast else "copies"
            self.refuse(
                ComputedValueError,
                f"{origin.op} {what} it to {origin.dtype}, and what lands here as {into.dtype} is "
                f"no region of the weight; {_NEXT}",
                origin.op,
                storage,
                weight=origin.name,
                where=origin.where,
            )
        self.landings += [Landing.of_region(storage, into, region) for region in regions]
