"""Programs: what a consumer computes from fetched slices before it lands.

A loader that casts, adds or concatenates makes values that are no region of any source. Its
operations on one module become one straight line of statements over *registers*, which the consumer
runs when all bytes of that module have arrived. Views are no statements: an operand is a strided
view of a register, read off the tensors themselves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from rdt_plan.slices import Slice

__all__ = [
    "Argument",
    "Constant",
    "Input",
    "Literal",
    "Operand",
    "Program",
    "Register",
    "Statement",
    "Target",
    "Temporary",
    "operands_of",
]


@dataclass(frozen=True, slots=True)
class Input:
    """A register that holds a fetched slice: its elements, contiguous, in iteration order."""

    slice: Slice


@dataclass(frozen=True, slots=True)
class Target:
    """A register that is a tensor of the destination's module."""

    param: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A register whose values the loader brought along, such as an index.

    Attributes:
        dtype: torch's name of it.
        shape: of a contiguous tensor.
        data: its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Temporary:
    """A register that a statement makes, as a tensor of this dtype, shape and strides."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


Register = Input | Target | Constant | Temporary


@dataclass(frozen=True, slots=True)
class Operand:
    """A strided view of a register.

    Attributes:
        register: its index in the program.
        dtype: what it is viewed as.
        offset: first element, in elements of ``dtype`` from the register's first element.
        shape: extents.
        stride: one a dim, in elements of ``dtype``; 0 repeats.
    """

    register: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Literal:
    """An argument that is no number and no tensor, by kind and torch's name.

    Kinds: ``dtype``, ``layout``, ``memory_format``, ``str``, and ``device``, whose name is empty:
    the consumer's own.
    """

    kind: str
    name: str


Argument: TypeAlias = "bool | int | float | Literal | Operand | tuple[Argument, ...] | None"


@dataclass(frozen=True, slots=True)
class Statement:
    """One operation.

    Attributes:
        op: torch's qualified name with overload, such as ``aten.add.Tensor``.
        args, kwargs: of the call; an operand that the operation writes into is written in place.
        results: registers that hold what it returns, in order; None for what nobody uses and for
            results of operations that write in place.
    """

    op: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    results: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """All computed writes into one module, in the loaders' order.

    Every write into a tensor that it writes is among its statements, plain copies and fills too.

    Attributes:
        module: dotted path of the destination's module.
        registers: by index.
        statements: in order; each is run once, after all inputs have arrived.
    """

    module: str
    registers: tuple[Register, ...]
    statements: tuple[Statement, ...]

    @property
    def inputs(self) -> tuple[tuple[int, Slice], ...]:
        """The slices it needs, each with its register."""
        return tuple(
            (index, register.slice)
            for index, register in enumerate(self.registers)
            if isinstance(register, Input)
        )

    @property
    def targets(self) -> tuple[str, ...]:
        """The tensors of the module that it reads or writes."""
        return tuple(r.param for r in self.registers if isinstance(r, Target))


def operands_of(statement: Statement) -> Iterator[Operand]:
    """The operands among a statement's arguments, in order."""

    def walk(argument: object) -> Iterator[Operand]:
        if isinstance(argument, Operand):
            yield argument
        elif isinstance(argument, tuple):
            for each in argument:
                yield from walk(each)

    yield from walk(statement.args)
    for _, argument in statement.kwargs:
        yield from walk(argument)
