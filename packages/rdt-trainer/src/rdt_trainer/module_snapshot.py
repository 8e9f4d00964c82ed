"""A module's tensors as they were: whether they still are is told at once, not name by name."""

import time
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, methodcaller

import torch
from torch import nn

__all__ = ["ModuleSnapshot"]

_TABLES = tuple(map(attrgetter, ("_parameters", "_buffers", "_modules")))
_values = methodcaller("values")


class ModuleSnapshot:
    """Tells whether a module or tensor was replaced, renamed, added, removed, moved or reshaped.

    Contents may differ. Costs some tenths of a microsecond a tensor, where `module_tensors` takes
    tens: lists are made and compared without a step of the interpreter for each tensor. What it
    costs is mostly memory that no cache holds any more, and `tensors_hold` touches little of it.

    Args:
        module: the root.
        tensors: those whose address, shape, strides and dtype count, of plain ones; of others, as
            a ``DTensor`` is, the shape alone. Kept, as are the modules.
    """

    def __init__(self, module: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
        self._modules = _modules_of(module)
        self._tensors = list(tensors)
        kinds = (torch.Tensor, nn.Parameter)
        self._plain = [t for t in self._tensors if type(t) in kinds and t.layout is torch.strided]
        tables = chain.from_iterable(map(table_of, self._modules) for table_of in _TABLES)
        self._filled = list(filter(None, tables))
        self._entries = self._entries_now()
        self._identity = self._identity_now()
        self._layout = self._layout_now()

    def holds(self) -> bool:
        """Whether all is as it was when this was made."""
        return self.modules_hold() and self._layout_now() == self._layout

    def tensors_hold(self) -> bool:
        """Whether what was there is there, and lies as it did.

        Something new, another name, and another table in the place of a module's own are left to
        `modules_hold`, which touches three times the memory.
        """
        return self._entries_now() == self._entries and self._layout_now() == self._layout

    def modules_hold(self) -> bool:
        """Whether all modules have the tensors and modules that they had, by name."""
        return self._identity_now() == self._identity

    def _entries_now(self) -> list[int]:
        found = list(map(id, chain.from_iterable(map(_values, self._filled))))
        _let_others_run()
        return found

    def _identity_now(self) -> list[list[object]]:
        """Of the same modules as then: where it is equal, there are no others."""
        found: list[list[object]] = []
        for table_of in _TABLES:
            tables = list(map(table_of, self._modules))
            found.append(list(map(len, tables)))
            filled = list(filter(None, tables))  # of most modules two are empty
            found.append(list(chain.from_iterable(filled)))
            found.append(list(map(id, chain.from_iterable(map(_values, filled)))))
            _let_others_run()
        return found

    def _layout_now(self) -> list[list[object]]:
        plain, found = self._plain, list[list[object]]()
        for asked, tensors in (
            (torch.Tensor.size, self._tensors),
            (torch.Tensor.data_ptr, plain),
            (torch.Tensor.stride, plain),
            (attrgetter("dtype"), plain),
        ):
            found.append(list(map(asked, tensors)))
            _let_others_run()
        return found


def _let_others_run() -> None:
    """Weights are being sent meanwhile; who waits for the interpreter waits for 5 ms otherwise."""
    time.sleep(0)


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
