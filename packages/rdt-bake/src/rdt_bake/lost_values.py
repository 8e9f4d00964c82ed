"""Numbers that torch would put on the meta device, where they are lost.

``weight[[0, 2]]`` makes an index tensor beside the weight, out of sight of any dispatch mode, and
so does ``torch.tensor([0, 2], device=param.device)``. Under `LostValues` they stay on the CPU. It
sees every call of torch, so a recording only runs under it when one without it lost something.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rdt_bake.errors import ComputedValueError, DataDependentError
from rdt_bake.ledger import Ledger
from rdt_bake.origins import Computed

__all__ = ["LostValueError", "LostValues"]

_INDEXED = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


_SHARES = frozenset(
    {
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.data_ptr,
        Tensor.storage,
        Tensor.untyped_storage,
        Tensor.share_memory_,
    }
)
_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
_LOOKS = _SHARES | {Tensor.tolist, Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.__repr__}


class LostValueError(ComputedValueError):
    """Values land that come of numbers which `LostValues` would have kept."""


class LostValues(TorchFunctionMode):
    """While active, lists and arrays of numbers become tensors on the CPU.

    It also sees who looks at the memory of a loader's own real tensors, without any operation:
    weights that were copied into these are not there. And it tells who moves a weight to the CPU
    from who reads it.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        ledger.sees_calls = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS and isinstance(args[0], Tensor):
            self._look(func, args[0])
        if func in _INDEXED:
            index = args[1]
            kept = tuple(map(_kept, index)) if isinstance(index, tuple) else _kept(index)
            args = (args[0], kept, *args[2:])
        elif func in _MAKERS and _is_meta(kwargs.get("device")):
            if not any(isinstance(each, Tensor) for each in args):
                kwargs = {**kwargs, "device": "cpu"}
        elif func is Tensor.new_tensor and args[0].is_meta:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype), device="cpu")
        return func(*args, **kwargs)

    def _look(self, func: Any, tensor: Tensor) -> None:
        ledger = self._ledger
        origin, own = ledger.origin(tensor), ledger.own_tensors.get(tensor)
        if tensor.is_meta:
            is_read = func in _READS and origin is not None and not ledger.is_constant(origin)
        else:
            is_read = type(origin) is Computed
            if origin is None and own is not None and func in _SHARES:
                own.is_shared = True
        if is_read and origin is not None:
            ledger.refuse(
                DataDependentError,
                f"{func.__name__} looks at values, and a recording has none: it runs once, before "
                "any weight is there; use torch's operations",
                func.__name__,
                weight=ledger.weight_of([(tensor, origin)]),
            )


def _kept(index: Any) -> Any:
    if isinstance(index, (list, range)) and index:
        return torch.tensor(list(index))
    is_array = hasattr(index, "__array_interface__") and not isinstance(index, Tensor)
    return torch.as_tensor(index) if is_array else index


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"
