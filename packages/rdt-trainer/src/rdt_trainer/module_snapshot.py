"""A module's tensors as they were: whether they still are is told at once, not name by name."""

import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, methodcaller
from typing import TypeVar

import torch
from torch import nn

from rdt_plan.collector import collector_paused

__all__ = ["ModuleSnapshot", "gentle_looks"]

_T = TypeVar("_T")

# How many modules or tensors are looked at before others run: about a millisecond of them, or a
# tenth of that.
_PART, _SMALL_PART = 1024, 128
_PAUSE_SECONDS = 2e-5  # long enough for a thread that waits to be woken; none at all is not

_tables_of = attrgetter("_parameters", "_buffers", "_modules")
_values = methodcaller("values")
_transient_of = attrgetter("_non_persistent_buffers_set")
_LAYOUT = (
    torch.Tensor.data_ptr,
    torch.Tensor.size,
    torch.Tensor.stride,
    attrgetter("dtype"),
)


class ModuleSnapshot:
    """Tells whether a module or tensor was replaced, renamed, added, removed, moved or reshaped.

    Also whether a buffer became persistent, or ceased to be. Contents may differ. Costs about a
    microsecond a tensor, where `module_tensors` takes tens: lists are made and compared without a
    step of the interpreter for each tensor. Most of it is memory that no cache holds any more, so
    each place is looked at once.

    Args:
        module: the root.
        tensors: those whose address, shape, strides and dtype count, of plain ones; of others, as
            a ``DTensor`` is, the shape alone. Kept, as are the modules.
    """

    def __init__(self, module: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
        self._modules = _modules_of(module)  # kept, so that no new one gets the id of one of them
        self._buffered = [each for each in self._modules if each._buffers]  # others are few
        kinds = (torch.Tensor, nn.Parameter)
        self._plain: list[torch.Tensor] = []
        self._others: list[torch.Tensor] = []
        for each in tensors:
            is_plain = type(each) in kinds and each.layout is torch.strided
            (self._plain if is_plain else self._others).append(each)
        self._layout = self._layout_now()
        self._entries = self._entries_now()

    def holds(self) -> bool:
        """Whether all is as it was when this was made."""
        with collector_paused():  # else it may walk the process's whole heap in the midst of a sync
            return self._entries_now() == self._entries and self._layout_now() == self._layout

    def _entries_now(self) -> list[list[object]]:
        """Of the modules as they were: where it is equal, there are no others."""
        lengths, names, ids = list[object](), list[object](), list[object]()
        for modules in _parts(self._modules):
            tables = list(chain.from_iterable(map(_tables_of, modules)))
            lengths += map(len, tables)
            filled = list(filter(None, tables))  # of most modules two are empty
            names += chain.from_iterable(filled)
            ids += map(id, chain.from_iterable(map(_values, filled)))
        return [lengths, names, ids, [*map(frozenset, map(_transient_of, self._buffered))]]

    def _layout_now(self) -> list[list[object]]:
        found: list[list[object]] = [[] for _ in (*_LAYOUT, torch.Tensor.size)]
        for tensors in _parts(self._plain):
            for answers, asked in zip(found, _LAYOUT, strict=False):
                answers += map(asked, tensors)
        for tensors in _parts(self._others):
            found[-1] += map(torch.Tensor.size, tensors)
        return found


class _Pace(threading.local):
    is_gentle = False


_pace = _Pace()


@contextmanager
def gentle_looks(are_wanted: bool) -> Generator[None]:
    """What this thread looks at meanwhile it looks at in small parts, if that is wanted.

    A source's interface has no word for it. For when chunks are packed: each pack waits for the
    interpreter again and again, a whole part each time. Small parts take longer in all.
    """
    _pace.is_gentle = are_wanted
    try:
        yield
    finally:
        _pace.is_gentle = False


def _parts(whole: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Piece by piece, and before each others run: weights are being sent meanwhile, and who waits
    for the interpreter waits for 5 ms otherwise."""
    size = min(_SMALL_PART, _PART) if _pace.is_gentle else _PART
    for start in range(0, len(whole), size):
        time.sleep(_PAUSE_SECONDS)
        yield whole[start : start + size]


def _modules_of(module: nn.Module) -> list[nn.Module]:
    """Itself and all inner ones, each once."""
    found = {id(module): module}
    waiting = [module]
    while waiting:
        inner = [each for each in waiting.pop()._modules.values() if each is not None]
        new = [each for each in inner if id(each) not in found]
        found |= {id(each): each for each in new}
        waiting += new
    return list(found.values())
