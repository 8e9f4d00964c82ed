"""What a running recording has seen computed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rdt_bake.constants import constant, uniform_element
from rdt_bake.destinations import DestinationStorage
from rdt_bake.frames import loader_line
from rdt_bake.nodes import Node, brought, mapped, views_in
from rdt_bake.origins import Brought, Computed, Constant, Copied, Origin, Source, View
from rdt_bake.storages import Storages
from rdt_bake.tensors import first_element, geometry, has_storage, tensors_in
from rdt_bake.twins import MetaTwins

__all__ = ["Trace"]

_aten = torch.ops.aten
_META = torch.device("meta")


class Trace(Storages):
    """The storages of one recording, and the operations that made or changed a value.

    Attributes:
        nodes: in order.
    """

    def __init__(self, twins: MetaTwins) -> None:
        super().__init__(twins)
        self.nodes: list[Node] = []
        self._brought: dict[Any, tuple[Tensor, View]] = {}

    def view(self, tensor: Tensor) -> View:
        """What the tensor stands for now, and how it sees it."""
        origin = self.origin(tensor)
        if origin is not None and not self.is_constant(origin):
            return _view(tensor, origin)
        tensor = self.real(tensor)
        key = geometry(tensor)
        if key not in self._brought or not _still_holds(*self._brought[key]):
            self._brought[key] = tensor, brought(tensor)  # its storage stays alive, and its key
        return self._brought[key][1]

    def write_real(self, func: Any, args: Any, written: Sequence[Tensor]) -> None:
        """Notes that an operation on real tensors wrote into some."""
        self._brought.clear()
        self.own_tensors.change(func, args, written)

    def note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Sequence[Any] = (),
        written: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Notes an operation that makes values, or changes some in place.

        Args:
            func, args, kwargs: the call.
            made: what it returned; a tensor among these is a new value, and gets its origin.
            written: position and name of the arguments that it writes into.
        """
        inputs = self.keyed(args, kwargs)
        where, weight, derived = loader_line(), self.weight_of(inputs), self.is_derived(inputs)
        tensors = list(tensors_in((args, kwargs)))
        problem = self._problem(func, [*tensors, *tensors_in(made)])
        if torch.get_default_dtype() != torch.float32 and not kwargs.get("dtype"):
            if _floats(made) and not _floats(tensors):
                problem = problem or f"{func} makes the default dtype, which another load has not"

        def view(value: Any) -> Any:
            return self.view(value) if isinstance(value, Tensor) else value

        own_args = tuple(mapped(each, view) for each in args)
        own_kwargs = {key: mapped(each, view) for key, each in kwargs.items()}
        results: list[Computed | None] = []
        for tensor in made:
            if not isinstance(tensor, Tensor):
                results.append(None)
                continue
            shape, stride = tuple(tensor.shape), tensor.stride()
            origin = Computed(str(func), where, weight, derived, tensor.dtype, shape, stride)
            results.append(origin)
            self.assign(tensor, origin)
        into = [own_args[at] if at < len(args) else own_kwargs.get(name) for at, name in written]
        writes = tuple(views_in(into))
        for changed in (each.origin for each in writes if derived):
            if type(changed) is Computed and not changed.derived:
                changed.derived, changed.weight = True, weight
        self.nodes.append(
            Node(func, own_args, own_kwargs, tuple(results), writes, where, weight, problem)
        )

    def note_copy(self, storage: DestinationStorage, into: Tensor, value: Tensor) -> None:
        """Notes that a value is copied ``into`` a view of ``storage``, which a program writes."""
        storage.programmed = True
        if self.origin(value) is storage:  # a copy must not read what it writes
            copy = torch.empty(value.shape, dtype=value.dtype, device=_META)
            self.note(_aten.clone.default, (value,), {}, [copy])
            value = copy
        func, view = _aten.copy_.default, _view(into, storage)
        weight, problem = self.weight_of(self.keyed(value)), self._problem(func, [value])
        args = view, self.view(value)
        self.nodes.append(Node(func, args, {}, (), (view,), loader_line(), weight, problem))

    def own(self, tensor: Tensor) -> None:
        """Makes the tensor's storage a value of its own, before something is written into it."""
        origin = self.origin(tensor)
        if type(origin) in (Computed, DestinationStorage):
            return
        weight, derived = self.current, False
        if isinstance(origin, (Source, Copied)):
            weight, derived = origin.name, True
        op, args, form = self._first_value(tensor, origin)
        kwargs = {} if op is _aten.clone.default else {"dtype": form.dtype, "device": _META}
        where = loader_line()
        made = Computed(str(op), where, weight, derived, form.dtype, form.shape, form.stride)
        self.assign(tensor, made)
        self.nodes.append(Node(op, args, kwargs, (made,), (), where, weight))

    def _first_value(self, tensor: Tensor, origin: Origin | None) -> tuple[Any, Any, Any]:
        """How to make what a storage holds: an operation, its arguments, and what has its form."""
        if isinstance(origin, Constant):
            return _aten.full.default, (origin.shape, origin.value), origin
        if isinstance(origin, (Source, Copied)):
            return _aten.clone.default, (origin.whole,), origin.whole
        own = self.own_tensors.get(tensor)
        assert own is not None
        if own.is_blank:
            return _aten.empty_strided.default, (own.shape, own.stride), own
        values = torch.empty(0, dtype=own.dtype, device=tensor.device)
        values.set_(tensor.untyped_storage(), 0, own.shape, own.stride)
        number = constant(uniform_element(values), values)
        if number is not None:
            return _aten.full.default, (own.shape, number.value), own
        whole = brought(values)
        return _aten.clone.default, (whole,), own

    def _problem(self, func: Any, tensors: Sequence[Tensor]) -> str | None:
        """Why an operation on these, made and taken, cannot be run again."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return f"{func} draws random numbers, and another load draws others"
        if torch.Tag.inplace_view in func.tags:
            return f"{func} changes the size of a tensor"
        nesting = torch.autocast_increment_nesting() - 1  # whether it is on cannot be asked here
        torch.autocast_decrement_nesting()
        if nesting:
            return f"{func} runs under autocast, which casts on some devices only; cast explicitly"
        if func.namespace != "aten":
            return f"{func} is none of torch's own operations, and a consumer may not have it"
        for tensor in tensors:
            if not has_storage(tensor):
                return f"{func} takes or makes a tensor of layout {tensor.layout}"
            if self.own_tensors.is_drawn(tensor):
                return f"{func} takes random numbers, and another load draws others"
            if tensor.is_conj() or tensor.is_neg():
                return f"{func} takes or makes a tensor with a conjugate or negative bit"
        return None


def _floats(values: Sequence[Any]) -> bool:
    """Whether a tensor among these is of a floating or complex dtype."""
    return any(t.is_floating_point() or t.is_complex() for t in tensors_in(values))


def _still_holds(tensor: Tensor, view: View) -> bool:
    """Whether the values are those noted; writes through an array of numpy go by unseen."""
    values = view.origin.values if isinstance(view.origin, Brought) else None
    if values is None:
        return True
    now = tensor.detach().cpu().contiguous()
    return torch.equal(now.reshape(-1).view(torch.uint8), values.reshape(-1).view(torch.uint8))


def _view(tensor: Tensor, origin: Origin) -> View:
    return View(origin, tensor.dtype, first_element(tensor), tuple(tensor.shape), tensor.stride())
