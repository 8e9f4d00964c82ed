"""Running a program: what the loader computed, computed again on the values that arrived."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rdt_bake.errors import ReplayError
from rdt_bake.memory import view_memory
from rdt_plan.program import (
    Constant,
    Input,
    Literal,
    Operand,
    Program,
    Register,
    Target,
    operands_of,
)

__all__ = ["run_program"]


def run_program(
    program: Program,
    inputs: Mapping[int, Tensor],
    destination: Callable[[str], Tensor],
    device: torch.device | str,
) -> None:
    """Runs all statements of ``program``, outside autograd, on the caller's thread and stream.

    Args:
        program: of one module.
        inputs: by register, the packed elements of each input: 1-D, uint8, on ``device``.
        destination: gives the whole tensor of the module by its attribute's name.
        device: where constants and temporaries are made.

    Raises:
        ReplayError: an operation does not exist, fails, or makes another tensor than was recorded;
            names the module, the operation and its place in the program.
    """
    device = torch.device(device)
    last = _last_uses(program)
    held: dict[int, Tensor] = {}

    def register(index: int) -> Tensor:
        if index not in held:
            held[index] = _load(program, index, inputs, destination, device)
        return held[index]

    def argument(value: Any) -> Any:
        if isinstance(value, Operand):
            what = f"{program.module}: register {value.register}"
            dtype = getattr(torch, value.dtype)
            return view_memory(
                register(value.register), dtype, value.offset, value.shape, value.stride, what
            )
        if isinstance(value, Literal):
            return device if value.kind == "device" else _literal(value)
        if isinstance(value, tuple):
            return [argument(each) for each in value]
        return value

    with torch.no_grad():
        for number, statement in enumerate(program.statements):
            try:
                op = _operation(statement.op)
                arguments = [argument(each) for each in statement.args]
                made = op(*arguments, **{key: argument(each) for key, each in statement.kwargs})
            except Exception as error:
                raise ReplayError(
                    f"{program.module}: statement {number} ({statement.op}) failed: {error}"
                ) from error
            results = made if isinstance(made, (tuple, list)) else (made,)
            for index, result in zip(statement.results, results, strict=False):
                if index is not None:
                    held[index] = _expected(program, number, index, result)
            for index in last.get(number, ()):
                held.pop(index, None)


def _last_uses(program: Program) -> dict[int, list[int]]:
    """Registers by the statement after which nobody needs them."""
    last: dict[int, int] = {}
    for number, statement in enumerate(program.statements):
        for operand in operands_of(statement):
            last[operand.register] = number
        last.update((index, number) for index in statement.results if index is not None)
    by_statement: dict[int, list[int]] = {}
    for index, number in last.items():
        by_statement.setdefault(number, []).append(index)
    return by_statement


def _load(
    program: Program,
    index: int,
    inputs: Mapping[int, Tensor],
    destination: Callable[[str], Tensor],
    device: torch.device,
) -> Tensor:
    match program.registers[index]:
        case Input(slice_):
            packed = inputs.get(index)
            if packed is None or packed.numel() != slice_.num_bytes:
                raise ReplayError(
                    f"{program.module}: expected the {slice_.num_bytes} bytes of {slice_.name!r} "
                    f"in register {index}, found {packed if packed is None else packed.numel()}"
                )
            return packed
        case Target(param):
            return destination(param)
        case Constant(dtype, shape, data):
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
            return flat.view(getattr(torch, dtype)).reshape(shape).to(device)
        case register:
            raise ReplayError(f"{program.module}: register {index} ({register}) was never made")


def _expected(program: Program, number: int, index: int, result: Any) -> Tensor:
    """``result`` with the dtype, shape and strides that were recorded for register ``index``."""
    register: Register = program.registers[index]
    found = result if isinstance(result, Tensor) else torch.as_tensor(result)
    dtype, shape, stride = getattr(torch, register.dtype), register.shape, register.stride  # type: ignore[union-attr]
    if found.dtype != dtype or tuple(found.shape) != shape:
        raise ReplayError(
            f"{program.module}: statement {number} ({program.statements[number].op}) made "
            f"{found.dtype}{list(found.shape)}, expected {dtype}{list(shape)} as recorded"
        )
    if found.stride() == stride and found.storage_offset() == 0:
        return found
    laid = torch.empty_strided(shape, stride, dtype=dtype, device=found.device)
    return laid.copy_(found)  # a kernel of this device that lays its result out otherwise


def _operation(name: str) -> Any:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace != "aten" or packet == "from_file":
        raise ReplayError(f"operation {name}: expected one of torch's own (aten), on tensors")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    if torch.Tag.inplace_view in op.tags or any(
        each.alias_info and not each.alias_info.is_write for each in op._schema.returns
    ):  # results are memory of their own, and operands say which part of theirs is seen
        raise ReplayError(f"operation {name}: expected none that moves or shares memory")
    return op


def _literal(value: Literal) -> Any:
    return value.name if value.kind == "str" else getattr(torch, value.name)
