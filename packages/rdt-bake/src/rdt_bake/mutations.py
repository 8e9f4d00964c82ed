"""Operations that write into tensors which are no plain copy or fill of the model's own."""

from typing import Any

import torch
from torch import Tensor

from rdt_bake.calls import Calls
from rdt_bake.constants import constant
from rdt_bake.destinations import DestinationStorage
from rdt_bake.errors import ComputedValueError, RebindError
from rdt_bake.ledger import Ledger
from rdt_bake.lost_values import LostValueError
from rdt_bake.own_tensors import Own
from rdt_bake.tensors import tensors_in

__all__ = ["Mutations"]

_RESIZES = ("aten.resize_.", "aten.resize_as_.")
_REBINDS = ("aten.set_.", *_RESIZES)

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


class Mutations:
    """What in-place operations do to the storages of a ledger."""

    def __init__(self, ledger: Ledger, calls: Calls) -> None:
        self._ledger = ledger
        self._calls = calls
        self._written: dict[Any, list[tuple[int, str]]] = {}

    def written(self, func: Any) -> list[tuple[int, str]]:
        """Position and name of the arguments that ``func`` writes into."""
        if func not in self._written:
            self._written[func] = [
                (at, argument.name)
                for at, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        return self._written[func]

    def _writes(self, func: Any, args: _Args, kwargs: _Kwargs) -> list[Tensor]:
        """The tensors that a call of ``func`` writes into."""
        places = self.written(func)
        return list(
            tensors_in(args[at] if at < len(args) else kwargs.get(name) for at, name in places)
        )

    def is_refilled(self, into: Tensor, args: _Args) -> bool:
        """Whether all of a storage now holds one number, so that it stands for that alone."""
        value = args[1] if len(args) > 1 else 0
        num_bytes = into.numel() * into.dtype.itemsize
        if isinstance(value, Tensor) or num_bytes != into.untyped_storage().nbytes():
            return False
        origin = constant(value, into)
        if origin is not None:
            self._ledger.assign(into, origin)
        return origin is not None

    def change(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """In-place operations: what they write into holds a computed value from now on."""
        ledger = self._ledger
        inputs = ledger.keyed(args, kwargs)
        written = self._writes(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._move(func, args, kwargs, written)
        tracked = [tensor for tensor, origin in inputs if not ledger.is_constant(origin)]
        if not tracked and all(ledger.origin(t) is None for t in written):
            ledger.write_real(func, args, written)
            return func(*ledger.real(args), **ledger.real(kwargs))
        landed: list[DestinationStorage] = []
        for tensor in written:
            origin = ledger.origin(tensor)
            if type(origin) is DestinationStorage:
                if ledger.may_land(origin, tensor, func):
                    landed.append(origin)
            elif origin is not None:
                ledger.own(tensor)
            elif (own := ledger.own_tensors.get(tensor)) is not None:
                self._check_own(func, own)
                ledger.own(tensor)
            else:
                ledger.refuse(
                    ComputedValueError,
                    f"{func} writes it into a tensor that is not reachable from the model's "
                    "modules",
                    func,
                    weight=ledger.weight_of(inputs),
                )
        out = self._run_in_place(func, args, kwargs, written)
        for storage in landed:  # only now: torch may refuse the call, and the loader go on
            storage.programmed = True
        ledger.note(func, args, kwargs, written=self.written(func))
        return out

    def _check_own(self, func: Any, own: Own) -> None:
        """Refuses to track a real tensor whose memory may be looked at, or written, unseen."""
        ledger = self._ledger
        if not ledger.sees_calls:
            ledger.refuse(LostValueError, f"{func} writes it into a CPU tensor", func)
        if own.is_shared:
            ledger.refuse(
                ComputedValueError,
                f"{func} writes it into a tensor whose memory was given to numpy or the like; "
                "use torch's operations alone",
                func,
            )

    def _run_in_place(self, func: Any, args: _Args, kwargs: _Kwargs, written: list[Tensor]) -> Any:
        """Lets torch check the call, without changing a real tensor."""
        ledger = self._ledger
        returned = len(func._schema.returns)
        given, before = (args, kwargs), [t.shape for t in written]
        if not all(t.is_meta for t in tensors_in(given)):
            given = ledger.on_meta(func, args), ledger.on_meta(func, kwargs)
        out = self._calls.run(func, *given)
        if [t.shape for t in self._writes(func, *given)] != before:
            ledger.refuse(
                ComputedValueError,
                f"{func} changes the size of the tensor that it writes into; give it one that fits",
                func,
            )
        if given[0] is args:
            return out
        return None if not returned else written[0] if returned == 1 else tuple(written)

    def _move(self, func: Any, args: _Args, kwargs: _Kwargs, written: list[Tensor]) -> Any:
        """Operations that change which memory a tensor sees, or how, and write nothing."""
        ledger = self._ledger
        if str(func).startswith(_REBINDS):
            for tensor in written:
                origin = ledger.origin(tensor)
                if type(origin) is DestinationStorage:
                    message = f"{func} gives the tensor other memory; copy into it instead"
                    weight = ledger.weight_of(ledger.keyed(args, kwargs))
                    ledger.refuse(RebindError, message, func, origin, weight=weight)
                if origin is not None and str(func).startswith(_RESIZES):
                    ledger.own(tensor)
                    ledger.note(func, args, kwargs, written=self.written(func))
        return func(*args, **kwargs)
