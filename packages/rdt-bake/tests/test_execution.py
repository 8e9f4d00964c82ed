"""What running a program checks, and what it says when something is wrong."""

import pytest
import torch
from torch import Tensor

from rdt_bake import ReplayError, run_program
from rdt_plan import Slice
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

WEIGHT = Slice("w", "float32", 0, (6,), (1,))
VALUES = torch.arange(6.0)
REGISTERS: tuple[Register, ...] = (
    Input(WEIGHT),
    Target("p"),
    Temporary("float32", (2, 3), (3, 1)),
    Constant("float32", (3,), torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes()),
)
READ = Operand(0, "float32", 0, (2, 3), (3, 1))
SCALES = Operand(3, "float32", 0, (2, 3), (0, 1))
MADE = Operand(2, "float32", 0, (2, 3), (3, 1))
INTO = Operand(1, "float32", 0, (2, 3), (1, 2))
LAND = Statement("aten.copy_.default", (INTO, MADE), (), (None,))


def run(*statements: Statement, registers: tuple[Register, ...] = REGISTERS) -> Tensor:
    param = torch.zeros(6)
    program = Program("layer", registers, statements)
    run_program(program, {0: VALUES.view(torch.uint8)}, lambda name: {"p": param}[name], "cpu")
    return param


def test_statements_run_on_views_of_registers() -> None:
    found = run(Statement("aten.mul.Tensor", (READ, SCALES), (), (2,)), LAND)
    assert found.view(3, 2).t().tolist() == [[0, 2, 6], [3, 8, 15]]


def test_literals_and_the_consumers_device() -> None:
    arguments = (
        ((2, 3), 2),
        (("dtype", Literal("dtype", "float32")), ("device", Literal("device", ""))),
    )
    assert run(Statement("aten.full.default", *arguments, (2,)), LAND).tolist() == [2.0] * 6
    rounded = Statement(
        "aten.div.Tensor_mode", (READ, 2), (("rounding_mode", Literal("str", "floor")),), (2,)
    )
    assert run(rounded, LAND).view(3, 2).t().flatten().tolist() == [0, 0, 1, 1, 2, 2]


def test_results_are_laid_out_as_recorded() -> None:
    columns = (*REGISTERS[:2], Temporary("float32", (2, 3), (1, 2)), REGISTERS[3])
    moved = Operand(2, "float32", 0, (6,), (1,))
    into = Operand(1, "float32", 0, (6,), (1,))
    found = run(
        Statement("aten.neg.default", (READ,), (), (2,)),
        Statement("aten.copy_.default", (into, moved), (), (None,)),
        registers=columns,
    )
    assert found.tolist() == (-VALUES.view(2, 3).t().flatten()).tolist()


@pytest.mark.parametrize(
    "statement, message",
    [
        (Statement("aten.frobnicate.default", (READ,), (), (2,)), "frobnicate"),
        (Statement("rdt.neg.default", (READ,), (), (2,)), "torch's own"),
        (Statement("aten.mm.default", (READ, READ), (), (2,)), "failed"),
        (Statement("aten.sum.default", (READ,), (), (2,)), r"expected torch\.float32\[2, 3\]"),
        (Statement("aten.gt.Scalar", (READ, 0), (), (2,)), r"made torch\.bool"),
    ],
)
def test_failures_name_the_module_and_the_statement(statement: Statement, message: str) -> None:
    with pytest.raises(ReplayError, match=message) as caught:
        run(statement, LAND)
    assert "layer: statement 0" in str(caught.value) and statement.op in str(caught.value)


@pytest.mark.parametrize(
    "statement",
    [
        Statement("aten.from_file.default", (Literal("str", "f"), True, 6), (), (2,)),
        Statement("aten.resize_.default", (INTO, (100,)), (), (None,)),
        Statement("aten.as_strided.default", (INTO, (2, 3), (3, 1), 0), (), (2,)),
    ],
)
def test_operations_that_reach_other_memory_are_refused(statement: Statement) -> None:
    with pytest.raises(ReplayError, match="expected"):
        run(statement)


def test_missing_and_short_inputs_are_refused() -> None:
    program = Program("layer", REGISTERS, (Statement("aten.neg.default", (READ,), (), (2,)),))
    for inputs in ({}, {0: torch.zeros(23, dtype=torch.uint8)}):
        with pytest.raises(ReplayError, match=r"24 bytes of 'w'"):
            run_program(program, inputs, lambda name: torch.zeros(6), "cpu")
