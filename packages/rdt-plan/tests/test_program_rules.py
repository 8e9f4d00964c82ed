from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from rdt_plan import PlanError, Slice, check_program
from rdt_plan.program import (
    Constant,
    Input,
    Literal,
    Operand,
    Program,
    Statement,
    Target,
    Temporary,
)
from rdt_plan.program_rules import MAX_CONSTANT_BYTES
from rdt_plan.testing import manifests, programs

INTO = Operand(0, "float32", 0, (2, 3), (3, 1))
FROM = Operand(1, "float32", 0, (2, 3), (3, 1))
COPY = Statement("aten.copy_.default", (INTO, FROM), (), ())
PROGRAM = Program(
    "m",
    (Target("w"), Input(Slice("a", "float32", 0, (6,), (1,))), Temporary("int8", (2, 2), (4, 1))),
    (Statement("aten.empty.memory_format", ((2, 2),), (), (2,)), COPY),
)


@settings(max_examples=50)
@given(manifests().flatmap(programs))
def test_well_formed_programs_pass(program: Program) -> None:
    check_program(program)


def with_registers(**changed: Any) -> Program:
    registers = list(PROGRAM.registers)
    for index, register in changed.items():
        registers[int(index[1:])] = register
    return replace(PROGRAM, registers=tuple(registers))


def with_statement(**changes: Any) -> Program:
    return replace(PROGRAM, statements=(PROGRAM.statements[0], replace(COPY, **changes)))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (replace(PROGRAM, statements=()), "at least one statement"),
        (replace(PROGRAM, registers=PROGRAM.registers[1:]), "expected targets"),
        (with_registers(r2=Target("w")), "each one register"),
        (with_registers(r0=Target("")), "register 0: expected an attribute's name"),
        (with_registers(r0=Target("%1")), "register 0: expected an attribute's name"),
        (with_registers(r1=Input(Slice("a", "float32", 0, (1, 6), (6, 1)))), "the canonical"),
        (with_registers(r1=Input(Slice("a", "float32", 0, (6,), (0,)))), "stride"),
        (with_registers(r1=Input(Slice("a", "float33", 0, (6,), (1,)))), "a dtype's name"),
        (with_registers(r1=Constant("float32", (6,), b"\0" * 23)), "the 24 bytes of float32"),
        (with_registers(r1=Constant("float32", (-6,), b"")), "no negative value"),
        (
            with_registers(r1=Constant("int8", (1 << 25,), bytes(1 << 25))),
            f"at most {MAX_CONSTANT_BYTES}, found {1 << 25} bytes",
        ),
        (with_registers(r2=Temporary("int8", (2, 2), (4,))), "register 2: expected one stride"),
        (with_registers(r2=Input(Slice("a", "int8", 0, (4,), (1,)))), "results in temporaries"),
        (with_statement(op="torchvision.nms.default"), r"statement 1 \(torchvision.nms.default\)"),
        (with_statement(op="aten.copy_"), "aten.NAME.OVERLOAD"),
        (with_statement(op="aten.copy_.default.x"), "aten.NAME.OVERLOAD"),
        (with_statement(op="aten.__class__()."), "aten.NAME.OVERLOAD"),
        (with_statement(kwargs=(("a", 1), ("a", 2))), "keywords, each once"),
        (with_statement(kwargs=(("a b", 1),)), "keywords, each once"),
        (with_statement(args=(((((1,),),),),)), None),
        (with_statement(args=((((((1,),),),),),)), "tuples at most 4 deep"),
        (with_statement(args=(Literal("dtype", "nn"),)), "a literal that this version knows"),
        (with_statement(args=(Literal("code", "nn"),)), "a literal that this version knows"),
        (with_statement(args=(Literal("str", "nn"),)), None),
        (with_statement(args=("nn",)), "an argument"),
        (with_statement(args=(1 << 64,)), "at most 64 bits"),
        (with_statement(args=(replace(FROM, register=3),)), "a register below 3, found 3"),
        (with_statement(args=(replace(FROM, register=-1),)), "a register below 3, found -1"),
        (with_statement(args=(replace(FROM, offset=1),)), "within the register's 24 bytes"),
        (with_statement(args=(replace(FROM, dtype="int64"),)), "within the register's 24 bytes"),
        (with_statement(args=(replace(FROM, shape=(0, 3), offset=99),)), None),
        (with_statement(args=((replace(FROM, stride=(-3, 1)),),)), "no negative value"),
        (with_statement(args=(replace(FROM, stride=(3,)),)), "one stride a dim"),
        (with_statement(args=(replace(FROM, dtype="x"),)), "a dtype's name"),
        (with_statement(args=(Operand(2, "int8", 5, (), ()),)), None),
        (with_statement(args=(Operand(2, "int8", 6, (), ()),)), "within the register's 6 bytes"),
        (with_statement(args=(replace(INTO, offset=1 << 40),)), None),  # a target may be any size
        (with_statement(results=(2,)), "each made once"),
        (with_statement(results=(1,)), "results in temporaries"),
        (with_statement(results=(9,)), "a register below 3"),
        (
            replace(PROGRAM, statements=(replace(COPY, args=(Operand(2, "int8", 0, (), ()),)),)),
            "an operand that a statement has made",
        ),
        (
            replace(
                PROGRAM,
                statements=(replace(COPY, args=(Operand(2, "int8", 0, (), ()),), results=(2,)),),
            ),
            "an operand that a statement has made",
        ),
    ],
)
def test_what_is_refused_is_named(program: Program, message: str | None) -> None:
    if message is None:
        check_program(program)
        return
    with pytest.raises(PlanError, match=message) as caught:
        check_program(program)
    assert str(caught.value).startswith("program of 'm'")
