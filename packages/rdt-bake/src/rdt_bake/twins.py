"""Meta twins that stand in for a model's tensors while its loaders run.

`MetaTwins` swaps them in and puts everything back: tensors, the attributes of modules and of
tensors, the contents of containers at any depth, hooks. What objects of any other class hold is
theirs: they may be the whole program's, as a configuration or a process group is.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from operator import is_
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rdt_bake.destinations import Destination, DestinationStorage
from rdt_bake.layouts import Layout
from rdt_bake.places import Place, module_paths, places
from rdt_bake.tensors import first_element, geometry, has_storage, is_foreign, storage_key

__all__ = ["MetaTwins"]

# In this order: a dict's own methods would break the order of an OrderedDict.
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the storage's start to the tensor's last element."""
    if tensor.numel() == 0:
        return 0
    last = first_element(tensor) + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.dtype.itemsize


class MetaTwins:
    """A context in which ``model`` holds meta twins, restored on leaving, also by an exception.

    Attributes (inside the context):
        storages: every storage of the model by key: that of the twins and that of the originals.
        destinations: one a distinct tensor, parameters first.
        foreign: places whose tensors are left alone and must not be loaded, and why.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._undo: list[Callable[[], None]] = []
        self._alive: list[Any] = []
        self.storages: dict[int, DestinationStorage] = {}
        self.destinations: list[Destination] = []
        self.foreign: dict[int, tuple[Place, str]] = {}

    def __enter__(self) -> "MetaTwins":
        found = places(self._model)
        self._remember(found)
        try:
            self._swap(found)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _remember(self, found: Iterable[Place]) -> None:
        """Notes how to put back all that a loader can change in what the model reaches."""
        todo: list[Any] = [module for _, module in module_paths(self._model)]
        todo += [place.tensor for place in found]
        seen: set[int] = set()
        leaves: set[type] = set()  # nearly all that there is: names, numbers, functions
        while todo:
            held = todo.pop()
            if type(held) in leaves or id(held) in seen:
                continue
            if isinstance(held, (torch.Tensor, nn.Module)):
                seen.add(id(held))
                todo.append(held.__dict__)
                if isinstance(held, torch.Tensor):
                    self._note_tensor(held)
            elif isinstance(held, tuple):
                seen.add(id(held))
                todo += held
            elif isinstance(held, _CONTAINERS):
                seen.add(id(held))
                todo += self._note(held)
                if type(held) not in _CONTAINERS:
                    todo.append(getattr(held, "__dict__", None))
            else:
                leaves.add(type(held))

    def _note(self, held: Any) -> list[Any]:
        """Remembers the contents of a container, and returns them.

        By its builtin class's own methods: those of a subclass may do more, or refuse.
        """
        kind = type(held)
        if kind not in _CONTAINERS:
            kind = next(each for each in _CONTAINERS if isinstance(held, each))
        before = _contents(kind, held)

        def undo() -> None:
            now = _contents(kind, held)
            if len(now) == len(before) and all(map(is_, now, before)):
                return
            kind.clear(held)
            if issubclass(kind, dict):
                half = len(before) // 2
                kind.update(held, zip(before[:half], before[half:], strict=True))
            elif kind is set:
                kind.update(held, before)
            else:
                kind.extend(held, before)

        self._undo.append(undo)
        return before

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        """Remembers class, storage and geometry of a tensor."""
        kind, requires_grad = tensor.__class__, tensor.requires_grad
        if is_foreign(kind) or tensor.is_nested or not has_storage(tensor):
            return
        empty = is_lazy(tensor)
        found = None if empty else geometry(tensor)
        data = tensor.data

        def undo() -> None:
            changed = tensor.__class__ is not kind
            if changed or (found is not None and geometry(tensor) != found):
                tensor.data = data
            if changed:
                tensor.__class__ = kind  # type: ignore[assignment]
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)

        self._undo.append(undo)

    def _restore(self) -> None:
        """Puts everything back; the first error on the way is raised only after all of it."""
        errors: list[Exception] = []
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _swap(self, found: list[Place]) -> None:
        bases: dict[int, torch.Tensor] = {}
        by_tensor: dict[int, Destination] = {}
        extents: dict[int, int] = {}
        usable = []
        for place in found:
            reason = self._refusal(place.tensor)
            if reason is not None:
                self.foreign.setdefault(id(place.tensor), (place, reason))
                continue
            usable.append(place)
            key = storage_key(place.tensor)
            extents[key] = max(extents.get(key, 0), _extent(place.tensor))
        tuples: dict[int, tuple[tuple, list]] = {}
        for place in usable:
            destination = by_tensor.get(id(place.tensor))
            if destination is None:
                destination = self._destination(place, bases, extents)
                by_tensor[id(place.tensor)] = destination
                self.destinations.append(destination)
            destination.places.append((place.module, place.param))
            if isinstance(place.container, tuple):
                holder = tuples.setdefault(
                    id(place.container), (place.container, list(place.container))
                )
                holder[1][place.key] = destination.tensor
            elif destination.tensor is not destination.original:
                place.container[place.key] = destination.tensor
        if tuples:
            self._swap_tuples(tuples)

    def _swap_tuples(self, tuples: dict[int, tuple[tuple, list]]) -> None:
        for _, module in module_paths(self._model):
            for name, value in list(module.__dict__.items()):
                if id(value) in tuples and any(
                    new is not old for new, old in zip(tuples[id(value)][1], value, strict=True)
                ):
                    items = tuples[id(value)][1]
                    make = getattr(type(value), "_make", type(value))
                    module.__dict__[name] = make(items)

    def _refusal(self, tensor: torch.Tensor) -> str | None:
        if is_foreign(type(tensor)):
            return f"its class {type(tensor).__name__} dispatches operations itself"
        if is_lazy(tensor):
            return "it is uninitialised, so it has no shape"
        if not has_storage(tensor):
            return f"its layout is {tensor.layout}"
        if tensor.is_conj() or tensor.is_neg():
            return "it has a conjugate or negative bit"
        try:
            Layout(tensor.shape, tensor.stride())
        except ValueError:
            return "it overlaps itself"
        return None

    def _destination(
        self, place: Place, bases: dict[int, torch.Tensor], extents: dict[int, int]
    ) -> Destination:
        original = place.tensor
        key = storage_key(original)
        storage = self.storages.get(key)
        if storage is None:
            storage = self.storages[key] = DestinationStorage(is_real=not original.is_meta)
        twin = original
        if not original.is_meta:
            base = bases.get(key)
            if base is None:
                base = torch.empty(extents[key], dtype=torch.uint8, device="meta")
                bases[key] = base
                self.storages[storage_key(base)] = storage
            data = torch.empty(0, dtype=original.dtype, device="meta").set_(
                base.untyped_storage(), first_element(original), original.shape, original.stride()
            )
            twin = torch.Tensor._make_subclass(type(original), data, original.requires_grad)
            twin.__dict__.update(original.__dict__)
        destination = Destination(
            places=[],
            kind=place.kind,
            original=original,
            tensor=twin,
            storage=storage,
            keys=(key, storage_key(twin)),
            offset=first_element(original),
            shape=tuple(original.shape),
            stride=original.stride(),
            dtype=original.dtype,
        )
        storage.destinations.append(destination)
        self._alive.append((original.untyped_storage(), twin.untyped_storage()))
        return destination


def _contents(kind: Any, held: Any) -> list[Any]:
    """The items of a container, or a dict's keys and then its values."""
    if issubclass(kind, dict):
        return [*kind.keys(held), *kind.values(held)]
    return list(kind.__iter__(held))
