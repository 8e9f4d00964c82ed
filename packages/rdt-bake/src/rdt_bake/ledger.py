"""What a running recording knows: what each storage stands for, and what has landed so far."""

from typing import Any, NoReturn

from torch import Tensor

from rdt_bake.constants import element_of, number, uniform_element
from rdt_bake.destinations import DestinationStorage
from rdt_bake.errors import DataDependentError, RecordError, UnsupportedTensorError
from rdt_bake.frames import loader_line
from rdt_bake.landings import Landing
from rdt_bake.origins import Computed, Constant, Copied, Source
from rdt_bake.passed_on import passed_on
from rdt_bake.tensors import first_element, geometry, has_storage
from rdt_bake.trace import Trace
from rdt_bake.twins import MetaTwins

__all__ = ["Ledger"]


class Ledger(Trace):
    """The state of one recording; used on one thread, while the model holds its twins.

    Attributes:
        landings: all plain writes into the model, in order.
        consumed: names of the sources that landed.
        refusal: the first error, in case the loader swallows it.
        sees_calls: whether all calls of torch are seen (`LostValues`), not only its operations.
    """

    def __init__(self, twins: MetaTwins) -> None:
        super().__init__(twins)
        self.landings: list[Landing] = []
        self.consumed: set[str] = set()
        self.refusal: RecordError | None = None
        self.sees_calls = False

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
        if origin is None and not has_storage(value):
            self.refuse(UnsupportedTensorError, f"it is of layout {value.layout}", op, storage)
        if value.shape != into.shape:
            value = value.expand(into.shape)
        if value.is_conj() or value.is_neg():
            self.refuse(UnsupportedTensorError, "it has a conjugate or negative bit", op, storage)
        if type(origin) is Source:
            self._landed(Landing.of_source(storage, into, origin.name, value))
        elif type(origin) is Copied:
            self._land_copied(storage, into, value, origin)
        elif type(origin) is Constant:
            self._land_element(storage, into, value, element_of(origin, value.dtype))
        elif origin is storage and geometry(into) == geometry(value):
            return
        elif origin is None or self.is_constant(origin):
            self._land_element(storage, into, value, uniform_element(self.real(value)))
        elif type(origin) is DestinationStorage and origin is not storage:
            self._land_passed_on(storage, into, value, origin)
        else:
            self.note_copy(storage, into, value)

    def _land_passed_on(
        self, storage: DestinationStorage, into: Tensor, value: Tensor, origin: DestinationStorage
    ) -> None:
        found = passed_on(self.landings, origin, storage, into, value)
        if found is None:
            self.note_copy(storage, into, value)
        for landing in found or ():
            self._landed(landing)

    def _land_element(
        self, storage: DestinationStorage, into: Tensor, value: Tensor, element: Tensor | None
    ) -> None:
        """Notes that ``value`` is copied, all of whose elements are ``element`` if there is one."""
        if element is None or self.own_tensors.is_drawn(value):
            self.note_copy(storage, into, value)
        else:
            self.land_number(storage, into, element)

    def land_number(self, storage: DestinationStorage, into: Tensor, value: Any) -> None:
        """Notes a fill of the view ``into`` with one number."""
        try:
            element = number(value, into.dtype)
        except UnsupportedTensorError as error:
            self.refuse(UnsupportedTensorError, str(error), "a fill", storage)
        self._landed(Landing.of_number(storage, into, self.current, element))

    def may_land(self, storage: DestinationStorage, into: Tensor, op: Any) -> bool:
        """Whether there is anything to write; refuses destinations that cannot be described."""
        if into.numel() == 0:
            return False
        problem = None
        if into.is_conj() or into.is_neg():
            problem = "has a conjugate or negative bit"
        elif 0 in (steps := into.stride()) and any(
            n > 1 and step == 0 for n, step in zip(into.shape, steps, strict=True)
        ):
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
            self.note_copy(storage, into, value)
        else:
            for region in regions:
                self._landed(Landing.of_region(storage, into, region))

    def _landed(self, landing: Landing) -> None:
        landing.after = len(self.nodes)
        self.landings.append(landing)
