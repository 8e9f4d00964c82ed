"""What every program keeps to, whoever wrote it down."""

from collections.abc import Iterator
from math import prod
from typing import NoReturn

from rdt_plan.dtypes import ITEM_BYTES
from rdt_plan.errors import ManifestError, PlanError, SliceError
from rdt_plan.program import (
    Constant,
    Input,
    Literal,
    Operand,
    Program,
    Statement,
    Target,
    Temporary,
    operands_of,
)
from rdt_plan.slices import canonical, last_element

__all__ = ["LITERALS", "MAX_CONSTANT_BYTES", "MAX_DEPTH", "check_program"]

MAX_CONSTANT_BYTES = 1 << 24
"""Largest constant a program may bring along."""

MAX_DEPTH = 4
"""How deep tuples may lie in an argument; torch's own take lists of tensors or numbers."""

LITERALS = {
    "dtype": frozenset(ITEM_BYTES),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset(
        {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}
    ),
    "device": frozenset({""}),
}
"""The names that a literal of each kind may have; a ``str`` may be any."""


def check_program(program: Program) -> None:
    """Refuse a program that contradicts itself.

    What only the consumer's model can tell (whether a target exists, and how large it is) and what
    only torch can (whether an operation exists, and takes these arguments) is for whoever runs it.

    Raises:
        PlanError: names the module, and what was expected and found where.

    >>> check_program(Program("norm", (Target("weight"),), ()))
    Traceback (most recent call last):
    rdt_plan.errors.PlanError: program of 'norm': expected at least one statement
    """
    what = f"program of {program.module!r}"
    if not program.statements:
        raise PlanError(f"{what}: expected at least one statement")
    params = program.targets
    if not params or len(set(params)) != len(params):
        raise PlanError(f"{what}: expected targets, each one register, found {params}")
    for index, register in enumerate(program.registers):
        try:
            _check_register(register)
        except (ManifestError, PlanError, SliceError) as error:
            raise PlanError(f"{what}: register {index}: {error}") from None
    made: set[int] = set()
    for number, statement in enumerate(program.statements):
        try:
            _check_statement(program, statement, made)
        except (ManifestError, PlanError) as error:
            raise PlanError(f"{what}: statement {number} ({statement.op}): {error}") from None


def _check_register(register: object) -> None:
    match register:
        case Input(slice_):
            _item_bytes(slice_.dtype)
            if slice_ != (expected := canonical(*slice_)):
                _refuse(f"the canonical {expected}", slice_)
        case Target(param):
            if not param or param.startswith("%"):
                _refuse("an attribute's name", param)
        case Constant(dtype, shape, data):
            _check_region(0, shape, (0,) * len(shape))
            num_bytes = prod(shape) * _item_bytes(dtype)
            if num_bytes != len(data) or num_bytes > MAX_CONSTANT_BYTES:
                _refuse(
                    f"the {num_bytes} bytes of {dtype}{list(shape)}, at most {MAX_CONSTANT_BYTES}",
                    f"{len(data)} bytes",
                )
        case Temporary(dtype, shape, stride):
            _check_region(0, shape, stride)
            _item_bytes(dtype)
        case _:
            _refuse("a register", register)


def _check_statement(program: Program, statement: Statement, made: set[int]) -> None:
    """``made`` holds the temporaries that exist by now, and takes what this one makes."""
    namespace, *names = statement.op.split(".")
    if namespace != "aten" or len(names) != 2 or not all(map(str.isidentifier, names)):
        _refuse("one of torch's own operations, as aten.NAME.OVERLOAD", statement.op)
    keys = [key for key, _ in statement.kwargs]
    if len(set(keys)) != len(keys) or not all(map(str.isidentifier, keys)):
        _refuse("keywords, each once", keys)
    for argument in (*statement.args, *(value for _, value in statement.kwargs)):
        for each in _leaves(argument):
            _check_leaf(each)
    for operand in operands_of(statement):
        _check_operand(program, operand, made)
    for index in statement.results:
        if index is None:
            continue
        if not isinstance(_register(program, index), Temporary) or index in made:
            _refuse("results in temporaries, each made once", f"register {index}")
        made.add(index)


def _leaves(argument: object, depth: int = 0) -> Iterator[object]:
    if not isinstance(argument, tuple):
        yield argument
        return
    if depth == MAX_DEPTH:
        _refuse(f"tuples at most {MAX_DEPTH} deep", argument)
    for each in argument:
        yield from _leaves(each, depth + 1)


def _check_leaf(argument: object) -> None:
    match argument:
        case Literal(kind, name):
            if kind != "str" and name not in LITERALS.get(kind, ()):
                _refuse("a literal that this version knows", argument)
        case int() if not -(1 << 63) <= argument < 1 << 64:
            _refuse("an integer of at most 64 bits", argument)
        case None | bool() | int() | float() | Operand():
            pass
        case _:
            _refuse("an argument", argument)


def _check_operand(program: Program, operand: Operand, made: set[int]) -> None:
    _check_region(operand.offset, operand.shape, operand.stride)
    item = _item_bytes(operand.dtype)
    register = _register(program, operand.register)
    if isinstance(register, Temporary) and operand.register not in made:
        _refuse("an operand that a statement has made", operand)
    end = 0
    if 0 not in operand.shape:
        end = (last_element(operand.offset, operand.shape, operand.stride) + 1) * item
    room = _room(register)
    if room is not None and end > room:
        _refuse(f"an operand within the register's {room} bytes", f"{operand} that ends at {end}")


def _room(register: object) -> int | None:
    """Bytes from a register's first element to the end of its last; None for a target."""
    match register:
        case Input(slice_):
            return slice_.num_bytes
        case Constant(_, _, data):
            return len(data)
        case Temporary(dtype, shape, stride):
            last = -1 if 0 in shape else last_element(0, shape, stride)
            return (last + 1) * _item_bytes(dtype)
    return None


def _register(program: Program, index: int) -> object:
    if not 0 <= index < len(program.registers):
        _refuse(f"a register below {len(program.registers)}", index)
    return program.registers[index]


def _check_region(offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    if len(shape) != len(stride):
        _refuse(f"one stride a dim of {shape}", stride)
    if min((offset, *shape, *stride)) < 0:
        _refuse("no negative value", (offset, shape, stride))


def _item_bytes(dtype: str) -> int:
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        _refuse("a dtype's name", dtype)


def _refuse(expected: str, found: object) -> NoReturn:
    raise PlanError(f"expected {expected}, found {found}")
