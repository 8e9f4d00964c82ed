"""Programs: a module's trace as plain data that can cross a wire."""

from typing import Any

import torch

from rdt_bake.constants import element_of
from rdt_bake.destinations import Destination, DestinationStorage
from rdt_bake.errors import ComputedValueError, UnsupportedTensorError
from rdt_bake.inputs import Inputs
from rdt_bake.nodes import Node, mapped
from rdt_bake.origins import Brought, Computed, Constant, Source, View
from rdt_bake.slicing import ModuleTrace
from rdt_bake.tensors import dtype_name
from rdt_plan.program import Constant as ConstantRegister
from rdt_plan.program import (
    Input,
    Literal,
    Operand,
    Program,
    Register,
    Statement,
    Target,
    Temporary,
)

__all__ = ["assembled"]


def assembled(trace: ModuleTrace, nodes: list[Node]) -> Program:
    """The program of ``nodes``, which are lowered and narrowed.

    Raises:
        ComputedValueError: an argument cannot be written down.
        UnsupportedTensorError: a write lies in no single tensor of the module.
    """
    assembly = _Assembly(nodes)
    statements = tuple(assembly.statement(node) for node in nodes)
    return Program(trace.module, tuple(assembly.registers), statements)


class _Assembly:
    def __init__(self, nodes: list[Node]) -> None:
        self.registers: list[Register] = []
        self._index: dict[Any, int] = {}
        self._inputs = Inputs(
            view
            for node in nodes
            for view in node.views()
            if isinstance(view.origin, Source) and 0 not in view.shape
        )

    def statement(self, node: Node) -> Statement:
        def argument(value: Any) -> Any:
            if isinstance(value, View):
                return self._operand(value, node)
            return _literal(value, node)

        args = tuple(_tuples(mapped(each, argument)) for each in node.args)
        kwargs = tuple(
            (key, _tuples(mapped(each, argument)))
            for key, each in node.kwargs.items()
            if each is not None
        )
        results = tuple(None if made is None else self._made(made) for made in node.results)
        return Statement(str(node.op), args, kwargs, results)

    def _register(self, key: Any, register: Register) -> int:
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.registers)
            self.registers.append(register)
        return index

    def _made(self, made: Computed) -> int:
        return self._register(made, Temporary(dtype_name(made.dtype), made.shape, made.stride))

    def _operand(self, view: View, node: Node) -> Operand:
        origin, offset, stride = view.origin, view.offset, view.stride
        if 0 in view.shape:
            register, offset = self._values(torch.empty(0, dtype=view.dtype)), 0
        elif isinstance(origin, Source):
            slice_, offset, stride = self._inputs.read(view)
            register = self._register(slice_, Input(slice_))
        elif isinstance(origin, Brought):
            if origin.values is None:
                raise _refusal(
                    "it computes with a tensor of the loader's own that is too large, "
                    "or on the meta device; bring small CPU tensors",
                    node,
                )
            register = self._values(origin.values)
        elif isinstance(origin, Constant):
            register, offset = self._values(_element(view, origin, node)), 0
            stride = (0,) * len(stride)
        elif isinstance(origin, DestinationStorage):
            destination = _owner(view, origin, node)
            at = destination.offset * destination.dtype.itemsize
            offset -= at // view.dtype.itemsize
            register = self._register((origin, destination.param), Target(destination.param))
        else:
            assert type(origin) is Computed
            register = self._made(origin)
        return Operand(register, dtype_name(view.dtype), offset, view.shape, stride)

    def _values(self, values: torch.Tensor) -> int:
        shape = tuple(values.shape)
        flat = values.reshape(-1).view(torch.uint8) if values.numel() else values
        data = flat.numpy().tobytes() if values.numel() else b""
        register = ConstantRegister(dtype_name(values.dtype), shape, data)
        return self._register(register, register)


def _element(view: View, constant: Constant, node: Node) -> torch.Tensor:
    element = element_of(constant, view.dtype)
    if element is None:
        raise _refusal(f"a tensor full of {constant.value} is viewed as {view.dtype}", node)
    return element


def _literal(value: Any, node: Node) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return Literal("str", value)
    if isinstance(value, torch.device):
        return Literal("device", "")
    if isinstance(value, torch.dtype):
        return Literal("dtype", dtype_name(value))
    for kind in ("layout", "memory_format"):
        if isinstance(value, getattr(torch, kind)):
            return Literal(kind, str(value).removeprefix("torch."))
    raise _refusal(f"its argument {value!r} cannot be recorded", node)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _owner(view: View, storage: DestinationStorage, node: Node) -> Destination:
    """The first of the storage's tensors in whose memory the view lies."""
    item = view.dtype.itemsize
    start, stop = view.offset * item, (_stop(view.offset, view.shape, view.stride)) * item
    for each in storage.destinations:
        own = each.dtype.itemsize
        first, end = each.offset * own, _stop(each.offset, each.shape, each.stride) * own
        inside = first <= start and stop <= end and first % item == 0
        if inside and each.module == storage.module:
            return each
    raise UnsupportedTensorError(
        "a computed write leaves the tensor and lies in no other single tensor of its module; "
        "write into each tensor on its own",
        weight=node.weight,
        op=str(node.op),
        where=node.where or None,
        module=storage.module,
        param=storage.destinations[0].param,
    )


def _stop(offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def _refusal(message: str, node: Node) -> ComputedValueError:
    return ComputedValueError(
        f"{node.op}: {message}", weight=node.weight, op=str(node.op), where=node.where or None
    )
