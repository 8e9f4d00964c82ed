"""The tracing mode: sees every operation of a loader and tells the ledger what it means.

View operations return at once: whatever shares a keyed storage is a view of it, with true offset,
shape and strides. Only copies, fills and operations that make new storage do any work.

A value that is no view is met in two places alone: `Recorder._made_storage`, when an operation
makes new storage of tensors that stand for something, and `Mutations.change`, when it writes into
one in place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rdt_bake.calls import Calls
from rdt_bake.derivation import EMPTY, derived, fresh
from rdt_bake.destinations import DestinationStorage
from rdt_bake.errors import UnsupportedTensorError
from rdt_bake.ledger import Ledger
from rdt_bake.mutations import Mutations
from rdt_bake.origins import Origin
from rdt_bake.selections import SELECTIONS
from rdt_bake.tensors import (
    always_views,
    has_storage,
    is_composite,
    is_foreign,
    storage_key,
    tensors_in,
)

__all__ = ["Recorder"]

_aten = torch.ops.aten

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
        self._calls = Calls(ledger)
        self._mutations = Mutations(ledger, self._calls)
        self._views: dict[int, Any] = {}  # by the operation's id: hashing it is a call of its own
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
        view = self._views.get(id(func))
        if view is not None:
            return view(*args, **kwargs) if kwargs else view(*args)
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._classify(func)
        return handler(func, args, kwargs or {})

    def _classify(self, func: Any) -> _Handler:
        if torch.Tag.data_dependent_output in func.tags:
            return self._calls.read_value
        if always_views(func):
            self._views[id(func)] = func._op  # `_handlers` keeps ``func``, so the id stays its own
            return self._plain
        if is_composite(func):
            return self._composite
        return self._mutations.change if self._mutations.written(func) else self._plain

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

    def _composite(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Operations that are composed of others; only inference mode hands them on whole."""
        with self:
            return func.decompose(*args, **kwargs)

    # -- operations that write nothing ------------------------------------------------------------

    def _plain(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        out = self._calls.run(func, args, kwargs)
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
            out, inputs = func(*ledger.real(args), **ledger.real(kwargs)), []
            new = [t for t in tensors_in((out,)) if ledger.origin(t) is None]
        strangers = {storage_key(t) for t in tensors_in((args, kwargs)) if has_storage(t)}
        computed: set[int] = set()
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
            elif inputs or tensor.is_meta:
                if not self._looked_through(func, args, inputs, tensor):
                    computed.add(id(tensor))
            else:
                ledger.own_tensors.add(func, args, tensor, ledger.current, is_blank=func in EMPTY)
        if computed:
            self._note_made(func, args, kwargs, out, computed)
        return out

    def _looked_through(
        self, func: Any, args: _Args, inputs: list[tuple[Tensor, Origin]], tensor: Tensor
    ) -> bool:
        """Whether the new ``tensor`` stands for something simple, which needs no computation."""
        if not inputs:
            origin = fresh(func, args, tensor)
        else:
            known = self._ledger.real(args) if func in SELECTIONS else args
            origin = derived(func, known, *inputs[0], tensor)
        if origin is not None:
            self._ledger.assign(tensor, origin)
        return origin is not None

    def _note_made(
        self, func: Any, args: _Args, kwargs: _Kwargs, out: Any, computed: set[int]
    ) -> None:
        if func in EMPTY:
            args = (list(out.shape), list(out.stride()))
            kwargs = {"dtype": out.dtype, "device": out.device}
            func = _aten.empty_strided.default
        results = out if isinstance(out, (list, tuple)) else (out,)
        made = [each if id(each) in computed else None for each in results]
        self._ledger.note(func, args, kwargs, made)

    def _to_copy(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        device, origin = kwargs.get("device"), self._ledger.origin(args[0])
        if origin is None and device is not None and device.type == "meta":
            kwargs = {**kwargs, "device": args[0].device}  # its values are known, and stay so
        if origin is None or device is None or device.type == "meta":
            return self._plain(func, args, kwargs)
        if self._ledger.is_constant(origin):
            return func(*self._ledger.real(args), **kwargs)
        if args[0].is_meta and device.type == "cpu" and not self._ledger.sees_calls:
            self._calls.ask_who_moves(func)
        return self._plain(func, args, {**kwargs, "device": torch.device("meta")})

    # -- operations that write --------------------------------------------------------------------

    def _copy(self, func: Any, args: _Args, kwargs: _Kwargs) -> Any:
        into, value = args[0], args[1]
        storage = self._ledger.origin(into)
        if type(storage) is not DestinationStorage:
            return self._mutations.change(func, args, kwargs)
        if into.shape != value.shape and into.is_meta:
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
            if storage is None or not self._mutations.is_refilled(into, args):
                self._mutations.change(func, args, kwargs)
            return into
        value = args[1] if len(args) > 1 else 0
        if isinstance(value, Tensor):
            self._ledger.land(storage, into, value, func)
        elif self._ledger.may_land(storage, into, func):
            self._ledger.land_number(storage, into, value)
        return into
