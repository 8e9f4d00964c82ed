"""Empty packages in place of some that are not installed.

vLLM's multimodal model files import image processors that import torchvision, and some files of
CUDA models import its kernel languages. Nothing of either runs while a model is built or loaded.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

from transformers.utils import import_utils

__all__ = ["install_stand_ins"]


class _Anything(type):
    """A class whose every attribute is such a class; calling it, as a decorator, returns its
    argument."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs else cls

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getattr__(cls, name: str) -> Any:
        return _anything(name)


class _Package(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # an import of what is inside reads it

    def __getattr__(self, name: str) -> Any:
        return _anything(name)


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == self._root or fullname.startswith(f"{self._root}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__version__"] = "0.0"


def install_stand_ins() -> None:
    """Make the imports work in this process, where they do not already."""
    import_utils.is_torchvision_available()  # transformers goes on believing that there is none
    for package in ("torchvision", "cutlass", "cuda"):
        if importlib.util.find_spec(package) is None:
            sys.meta_path.append(_Finder(package))
