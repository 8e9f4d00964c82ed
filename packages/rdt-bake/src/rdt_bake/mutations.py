"""Operations that write into tensors which are no plain copy or fill of the model's own."""

from typing import Any

import torch
from torch import Tensor

from rdt_bake.calls import Calls
from rdt_bake.constants import constant
from rdt_bake.destinations import DestinationStorage
from rdt_bake.errors import ComputedValueError, RebindError
from rdt_bake.ledger import Ledger
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
        places = self.written(func)
        written = list(
            tensors_in(args[at] if at < len(args) else kwargs.get(name) for at, name in places)
        )
        if torch.Tag.inplace_view in func.tags:
            return self._move(func, args, kwargs, written)
        if not inputs or not (
            ledger.is_derived(inputs) or any(ledger.origin(t) is not None for t in written)
        ):
            ledger.write_real(func, args, written)
            return func(*ledger.real(args), **ledger.real(kwargs))
        for tensor in written:
            origin = ledger.origin(tensor)
            if type(origin) is DestinationStorage:
                if ledger.may_land(origin, tensor, func):
                    origin.programmed = True
            elif origin is not None or ledger.own_tensors.get(tensor) is not None:
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
        ledger.note(func, args, kwargs, written=places)
        return out

    def _run_in_place(self, func: Any, args: _Args, kwargs: _Kwargs, written: list[Tensor]) -> Any:
        """Lets torch check the call, without changing a real tensor."""
        ledger = self._ledger
        if all(t.is_meta for t in tensors_in((args, kwargs))):
            return self._calls.run(func, args, kwargs)
        self._calls.run(func, ledger.on_meta(func, args), ledger.on_meta(func, kwargs))
        returned = len(func._schema.returns)
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
