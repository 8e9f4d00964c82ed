"""Making a loader's calls: on meta tensors, or on values that are known while recording."""

from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from rdt_bake.destinations import DestinationStorage
from rdt_bake.errors import ComputedValueError, DataDependentError
from rdt_bake.ledger import Ledger
from rdt_bake.lost_values import LostValueError
from rdt_bake.origins import Origin
from rdt_bake.tensors import tensors_in

__all__ = ["Calls"]

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


class Calls:
    """Makes calls for a recorder, and refuses by name what a recording cannot answer."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def run(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """What ``func`` returns; refuses what needs values, or cannot be done without any."""
        ledger, given = self._ledger, (args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags and any(
            not t.is_meta and not ledger.is_constant(o) for t, o in ledger.keyed(args, kwargs)
        ):  # weights were copied into it, and are not there
            given = ledger.on_meta(func, args), ledger.on_meta(func, kwargs)
        try:
            return func(*given[0], **given[1])
        except (NotImplementedError, RuntimeError) as error:
            return self._failed(func, args, kwargs, error)

    def read_value(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """What ``func``, which turns tensors into Python values, returns for known ones."""
        ledger = self._ledger
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            # `.item()`: a loader may ask a map where each expert is, once a weight.
            origin = ledger.origin(args[0])
            if type(origin) is DestinationStorage and ledger.is_constant(origin):
                return func._op(ledger.real_view(args[0], origin))
        inputs = ledger.keyed(args, kwargs)
        for _, origin in inputs:
            if not ledger.is_constant(origin):
                self.refuse_value(func, inputs)
        return func(*ledger.real(args), **ledger.real(kwargs))

    def _failed(self, func: Any, args: _Args, kwargs: _Kwargs, error: Exception) -> Any:
        """An operation that meta tensors do not have, or not together with real ones.

        Folds constants, or says what is wrong.
        """
        ledger = self._ledger
        inputs = ledger.keyed(args, kwargs)
        if inputs and all(ledger.is_constant(origin) for _, origin in inputs):
            return func(*ledger.real(args), **ledger.real(kwargs))
        if not inputs or not (isinstance(error, NotImplementedError) or "meta" in str(error)):
            raise error
        with suppress(NotImplementedError, RuntimeError):
            return func(*ledger.on_meta(func, args), **ledger.on_meta(func, kwargs))
        if any(t.is_meta and ledger.origin(t) is None for t in tensors_in((args, kwargs))):
            ledger.refuse(LostValueError, f"{func} takes numbers that are lost", func)
        if torch.Tag.dynamic_output_shape in func.tags or "item()" in str(error):
            self.refuse_value(func, inputs)
        ledger.refuse(
            ComputedValueError,
            f"{func} cannot run on the meta device at all ({error})",
            func,
            weight=ledger.weight_of(inputs),
        )

    def ask_who_moves(self, func: Any) -> NoReturn:
        """Has the recording run again under `LostValues`, for a weight that goes to the CPU.

        ``.tolist()`` and its like do that, to read it; a loader that merely moves it need not.
        """
        self._ledger.refuse(LostValueError, f"{func} moves it to the CPU", func)

    def refuse_value(self, func: Any, inputs: list[tuple[Tensor, Origin]]) -> NoReturn:
        """Raises `DataDependentError`, naming weight, operation and line."""
        self._ledger.refuse(
            DataDependentError,
            f"{func} asks for values, and a recording has none: it runs once, before any weight is "
            "there; decide by names, shapes and dtypes",
            func,
            weight=self._ledger.weight_of(inputs),
        )
