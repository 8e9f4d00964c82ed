"""The tracing mode: sees every operation of a loader and tells the ledger what it means.

View operations return at once: whatever shares a keyed storage is a view of it, with true offset,
shape and strides. Only copies, fills and operations that make new storage do any work.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rdt_bake.derivation import COPIES, derived, fresh
from rdt_bake.destinations import DestinationStorage
from rdt_bake.errors import (
    ComputedValueError,
    DataDependentError,
    RebindError,
    UnsupportedTensorError,
)
from rdt_bake.frames import loader_line
from rdt_bake.ledger import Ledger
from rdt_bake.origins import Computed, Origin
from rdt_bake.tensors import has_storage, is_foreign, storage_key, tensors_in

__all__ = ["Recorder"]

_aten = torch.ops.aten
_REBINDS = ("aten.set_.", "aten.resize_.", "aten.resize_as_.")

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_Handler = Callable[[Any, _Args, _Kwargs], Any]


class Recorder(TorchDispatchMode):
    """While active, notes in ``ledger`` what operations of this thread do to keyed storages."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._origins = ledger.origins
        self._plain_types: set[type] = {Tensor, torch.nn.Parameter}
        self._written_args: dict[Any, list[tuple[int, str]]] = {}
        self._handlers: dict[Any, _Handler] = {
            _aten.copy_.default: self._copy,
            _aten._foreach_copy_.default: self._foreach_copy,
            _aten.fill_.Scalar: self._fill,
            _aten.fill_.Tensor: self._fill,
            _aten.zero_.default: self._fill,
            _aten._to_copy.default: self._to_copy,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler and wrap every call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: _Kwargs | None = None
    ) -> Any:
        if types and not self._plain_types.issuperset(types):
            self._check_types(func, types, args, kwargs or {})
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._classify(func)
        return handler(func, args, kwargs or {})

    def _classify(self, func: Any) -> _Handler:
        if torch.Tag.data_dependent_output in func.tags:
            return self._read_value
        return self._mutate if self._written(func) else self._plain

    def _written(self, func: Any) -> list[tuple[int, str]]:
        """Position and name of the arguments that ``func`` writes into."""
        if func not in self._written_args:
            self._written_args[func] = [
                (at, argument.name)
                for at, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        return self._written_args[func]

    def _check_types(self, func: Any, types: Any, args: _Args, kwargs: _Kwargs) -> None:
        foreign = next((kind for kind in types if is_foreign(kind)), None)
        if foreign is None:
            self._plain_types.update(types)
        elif self._ledger.keyed(args, kwargs):
            self._ledger.refuse(
                UnsupportedTensorError,
                f"{func} mixes it with a {foreign.__name__}, a tensor class that dispatches "
                "operations itself; load plain tensors",
                func,
            )

    # -- operations that write nothing ------------------------------------------------------------

    def _plain(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            return self._failed(func, args, kwargs, error)
        if type(out) is Tensor and has_storage(out) and storage_key(out) in self._origins:
            return out  # a view, whatever its schema says
        return self._made_storage(func, args, kwargs, out)

    def _made_storage(self, func: Any, args: _Args, kwargs: _Kwargs, out: Any) -> Any:
        """Notes what the storages of the results stand for, unless they are known ones."""
        ledger = self._ledger
        new = [t for t in tensors_in((out,)) if ledger.origin(t) is None]
        if not new:
            return out
        inputs = ledger.keyed(args, kwargs)
        if inputs and all(ledger.is_constant(origin) for _, origin in inputs):
            return func(*ledger.real(args), **ledger.real(kwargs))
        strangers = {storage_key(t) for t in tensors_in((args, kwargs)) if has_storage(t)}
        for tensor in new:
            if not has_storage(tensor) or is_foreign(type(tensor)):
                if inputs:
                    ledger.refuse(
                        UnsupportedTensorError,
                        f"{func} makes a {type(tensor).__name__} of layout {tensor.layout} of it; "
                        "load plain strided tensors",
                        func,
                        weight=ledger.weight_of(inputs),
                    )
            elif storage_key(tensor) in strangers:
                continue  # a view of a tensor that we know nothing about
            elif inputs:
                ledger.assign(tensor, derived(func, args, inputs, tensor, ledger))
            elif tensor.is_meta:
                ledger.assign(tensor, fresh(func, args, tensor, ledger))
            else:
                ledger.born[storage_key(tensor)] = ledger.current
        return out

    def _to_copy(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        device, origin = kwargs.get("device"), self._ledger.origin(args[0])
        if origin is None or device is None or device.type == "meta":
            return self._plain(func, args, kwargs)
        if self._ledger.is_constant(origin):
            return func(*self._ledger.real(args), **kwargs)
        if args[0].is_meta and device.type == "cpu":  # .tolist() and .numpy() come by here
            self._refuse_value(func, [(args[0], origin)])
        return self._plain(func, args, {**kwargs, "device": torch.device("meta")})

    def _read_value(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Operations that turn tensors into Python values."""
        inputs = self._ledger.keyed(args, kwargs)
        if not inputs:
            return func(*args, **kwargs)
        if all(self._ledger.is_constant(origin) for _, origin in inputs):
            return func(*self._ledger.real(args), **self._ledger.real(kwargs))
        self._refuse_value(func, inputs)

    def _failed(self, func: Any, args: _Args, kwargs: _Kwargs, error: Exception) -> Any:
        """An operation that meta tensors do not have: fold constants, or say what is wrong."""
        ledger = self._ledger
        inputs = ledger.keyed(args, kwargs)
        if inputs and all(ledger.is_constant(origin) for _, origin in inputs):
            return func(*ledger.real(args), **ledger.real(kwargs))
        if not inputs or not (isinstance(error, NotImplementedError) or "meta" in str(error)):
            raise error
        if torch.Tag.dynamic_output_shape in func.tags or "item()" in str(error):
            self._refuse_value(func, inputs)
        ledger.refuse(
            ComputedValueError,
            f"{func} makes a new value, and cannot run on the meta device at all ({error})",
            func,
            weight=ledger.weight_of(inputs),
        )

    def _refuse_value(self, func: Any, inputs: list[tuple[Tensor, Origin]]) -> NoReturn:
        asks = "asks for values"
        if func in COPIES:
            asks = "moves it to the CPU (rather than to the parameter's device) for its values"
        self._ledger.refuse(
            DataDependentError,
            f"{func} {asks}, and a recording has none: it runs once, before any weight is there; "
            "decide by names, shapes and dtypes",
            func,
            weight=self._ledger.weight_of(inputs),
        )

    # -- operations that write --------------------------------------------------------------------

    def _copy(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        into, value = args[0], args[1]
        storage = self._ledger.origin(into)
        if type(storage) is not DestinationStorage:
            return self._mutate(func, args, kwargs)
        if into.is_meta:
            func(*args, **kwargs)  # torch's own checks
        self._ledger.land(storage, into, value, func)
        return into

    def _foreach_copy(self, func: Any, args: _Args, kwargs: _Kwargs) -> None:
        for into, value in zip(args[0], args[1], strict=True):
            self._copy(_aten.copy_.default, (into, value), {})

    def _fill(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        into = args[0]
        storage = self._ledger.origin(into)
        if type(storage) is not DestinationStorage:
            return self._mutate(func, args, kwargs)
        value = args[1] if len(args) > 1 else 0
        if isinstance(value, Tensor):
            self._ledger.land(storage, into, value, func)
        elif self._ledger.may_land(storage, into, func):
            self._ledger.land_number(storage, into, value)
        return into

    def _mutate(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """In-place operations: what they write into holds a computed value from now on."""
        ledger = self._ledger
        inputs = ledger.keyed(args, kwargs)
        from_weights = ledger.is_derived(inputs)
        for at, name in self._written(func):
            for tensor in tensors_in((args[at] if at < len(args) else kwargs.get(name),)):
                origin = ledger.origin(tensor)
                if type(origin) is DestinationStorage:
                    self._refuse_in_place(func, origin, tensor, inputs)
                elif origin is not None:
                    ledger.origins[storage_key(tensor)] = Computed(
                        str(func), loader_line(), ledger.weight_of(inputs), from_weights
                    )
                elif from_weights:
                    ledger.refuse(
                        ComputedValueError,
                        f"{func} writes it into a tensor that is not reachable from the model's "
                        "modules",
                        func,
                        weight=ledger.weight_of(inputs),
                    )
        if inputs and all(ledger.is_constant(origin) for _, origin in inputs):
            return func(*ledger.real(args), **ledger.real(kwargs))
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            return self._failed(func, args, kwargs, error)

    def _refuse_in_place(
        self,
        func: Any,
        storage: DestinationStorage,
        tensor: Tensor,
        inputs: list[tuple[Tensor, Origin]],
    ) -> None:
        weight = self._ledger.weight_of(inputs)
        if str(func).startswith(_REBINDS):
            message = f"{func} gives the tensor other memory; copy into it instead"
            self._ledger.refuse(RebindError, message, func, storage, weight=weight)
        if tensor.numel():
            message = f"{func} computes a new value in place; only copies and fills are recorded"
            self._ledger.refuse(ComputedValueError, message, func, storage, weight=weight)
