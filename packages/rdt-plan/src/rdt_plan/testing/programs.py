"""Hypothesis strategies for programs: well-formed ones, which need not mean anything to torch."""

from math import prod
from typing import Any

from hypothesis import strategies as st

from rdt_plan.dtypes import item_bytes
from rdt_plan.manifest import Manifest
from rdt_plan.program import (
    Constant,
    Input,
    Literal,
    Operand,
    Program,
    Register,
    Statement,
    Target,
    Temporary,
)
from rdt_plan.program_rules import LITERALS
from rdt_plan.slices import contiguous_stride
from rdt_plan.testing.strategies import dtype_names, slices

__all__ = ["programs"]

_OPS = ("aten.add.Tensor", "aten.copy_.default", "aten.cat.default", "aten._to_copy.default")


@st.composite
def programs(draw: st.DrawFn, manifest: Manifest, module: str = "computed") -> Program:
    """A program of ``module`` over slices of ``manifest``, some of them empty, perhaps none."""
    registers: list[Register] = [
        Input(draw(slices(draw(st.sampled_from(manifest.params)))))
        for _ in range(draw(st.integers(0, 3)))
    ]
    registers += [Target(f"t{index}") for index in range(draw(st.integers(1, 2)))]
    for _ in range(draw(st.integers(0, 1))):
        dtype, numel = draw(dtype_names()), draw(st.integers(0, 3))
        size = numel * item_bytes(dtype)
        data = draw(st.binary(min_size=size, max_size=size))
        registers.append(Constant(dtype, (numel,), data))
    ready = list(range(len(registers)))
    statements = []
    for _ in range(draw(st.integers(1, 3))):
        args = tuple(draw(_arguments(registers, ready)) for _ in range(draw(st.integers(1, 3))))
        kwargs = draw(
            st.sampled_from(((), (("alpha", 2),), (("dtype", Literal("dtype", "int8")),)))
        )
        results: list[int | None] = []
        for made in draw(st.lists(st.booleans(), max_size=2)):
            results.append(len(registers) if made else None)
            if made:
                shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
                registers.append(Temporary(draw(dtype_names()), shape, contiguous_stride(shape)))
        statements.append(Statement(draw(st.sampled_from(_OPS)), args, kwargs, tuple(results)))
        ready += [index for index in results if index is not None]
    return Program(module, tuple(registers), tuple(statements))


@st.composite
def _operands(draw: st.DrawFn, registers: list[Register], ready: list[int]) -> Operand:
    index = draw(st.sampled_from(ready))
    dtype = draw(dtype_names())
    match registers[index]:
        case Input(slice_):
            room = slice_.num_bytes
        case Constant(_, _, data):
            room = len(data)
        case Temporary(made, shape, _):
            room = item_bytes(made) * prod(shape)
        case _:
            room = 64
    numel = draw(st.integers(0, room // item_bytes(dtype)))
    offset = 0 if numel == 0 else draw(st.integers(0, room // item_bytes(dtype) - numel))
    stride = draw(st.sampled_from((0, 1)))
    return Operand(index, dtype, offset, (numel, 1), (stride, 7))


def _arguments(registers: list[Register], ready: list[int]) -> st.SearchStrategy[Any]:
    literals = st.sampled_from(sorted(LITERALS)).flatmap(
        lambda kind: st.sampled_from(sorted(LITERALS[kind])).map(lambda name: Literal(kind, name))
    )
    leaf = st.one_of(
        _operands(registers, ready),
        literals,
        st.text(max_size=3).map(lambda text: Literal("str", text)),
        st.none(),
        st.booleans(),
        st.integers(-9, 9),
        st.floats(allow_nan=False),
    )
    return st.one_of(leaf, st.lists(leaf, max_size=3).map(tuple))
