import json
from dataclasses import replace
from math import nan
from typing import Any

import pytest
from hypothesis import given, settings

from rdt_plan import WireFormatError
from rdt_plan._program_form import program_form, program_of
from rdt_plan.digest import canonical_json, digest_of
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
from rdt_plan.slices import Slice
from rdt_plan.testing import manifests, programs

PROGRAM = Program(
    "layers.0.norm",
    (
        Input(Slice("norm", "float32", 4, (3,), (2,))),
        Target("weight"),
        Constant("int8", (2,), b"\x00\xff"),
        Temporary("float32", (3,), (1,)),
    ),
    (
        Statement(
            "aten.add.Scalar",
            (Operand(0, "float32", 0, (3,), (1,)), 0.1, True, None, (-1, (2,))),
            (("alpha", Literal("dtype", "bfloat16")), ("device", Literal("device", ""))),
            (3,),
        ),
        Statement(
            "aten.copy_.default",
            (Operand(1, "float32", 0, (3,), (1,)), Operand(3, "float32", 0, (3,), (1,))),
            (),
            (None,),
        ),
    ),
)
GOLDEN = (
    '["layers.0.norm",'
    '[{"input":["norm","float32",4,[3],[2]]},{"target":"weight"},'
    '{"constant":["int8",[2],"AP8="]},{"temporary":["float32",[3],[1]]}],'
    '[["aten.add.Scalar",[{"view":[0,"float32",0,[3],[1]]},{"float":"0x1.999999999999ap-4"},'
    'true,null,[-1,[2]]],[["alpha",{"dtype":"bfloat16"}],["device",{"device":""}]],[3]],'
    '["aten.copy_.default",[{"view":[1,"float32",0,[3],[1]]},{"view":[3,"float32",0,[3],[1]]}],'
    "[],[null]]]]"
)


def test_a_golden_program() -> None:
    assert canonical_json(program_form(PROGRAM)).decode() == GOLDEN
    found = program_of(json.loads(GOLDEN))
    assert found == PROGRAM
    assert [type(each) for each in found.statements[0].args[1:4]] == [float, bool, type(None)]


@settings(max_examples=60)
@given(manifests().flatmap(programs))
def test_every_program_comes_back(program: Program) -> None:
    text = canonical_json(program_form(program))
    again = program_of(json.loads(text))
    assert again == program
    assert canonical_json(program_form(again)) == text  # -0.0 equals 0.0, and is another number


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), nan, -0.0, 5e-324])
def test_floats_are_exact(value: float) -> None:
    first, *others = PROGRAM.statements
    statement = replace(first, args=(first.args[0], value))
    program = replace(PROGRAM, statements=(statement, *others))
    found = program_of(json.loads(canonical_json(program_form(program))))
    assert repr(found.statements[0].args[1]) == repr(value)


def changes(program: Program) -> list[Program]:
    """The program with one field changed, once for each field there is."""
    found = [replace(program, module=program.module + "x")]
    for index, register in enumerate(program.registers):
        match register:
            case Input(slice_):
                others = [Input(slice_._replace(name="x")), Input(slice_._replace(dtype="x"))]
                others += [Input(slice_._replace(offset=slice_.offset + 1))]
                others += [Input(slice_._replace(shape=(*slice_.shape, 2)))]
                others += [Input(slice_._replace(stride=(*slice_.stride, 2)))]
            case Target(param):
                others = [Target(param + "x")]
            case Constant(dtype, shape, data):
                others = [Constant(dtype + "x", shape, data), Constant(dtype, (*shape, 1), data)]
                others += [Constant(dtype, shape, data + b"x")]
            case Temporary():
                others = [replace(register, dtype="x"), replace(register, shape=(9, 9, 9))]
                others += [replace(register, stride=(9, 9, 9))]
        for other in others:
            registers = (*program.registers[:index], other, *program.registers[index + 1 :])
            found.append(replace(program, registers=registers))
    for index, statement in enumerate(program.statements):
        for change in (
            {"op": statement.op + "x"},
            {"args": (*statement.args, 1)},
            {"args": (*statement.args, 1.0)},
            {"args": (*statement.args, True)},
            {"args": (*statement.args, None)},
            {"args": (*statement.args, ())},
            {"args": (*statement.args, Literal("str", "1"))},
            {"args": (*statement.args, Literal("dtype", "1"))},
            {"args": (*statement.args, Operand(0, "int8", 0, (), ()))},
            {"args": (*statement.args, Operand(1, "int8", 0, (), ()))},
            {"args": (*statement.args, Operand(0, "uint8", 0, (), ()))},
            {"args": (*statement.args, Operand(0, "int8", 1, (), ()))},
            {"args": (*statement.args, Operand(0, "int8", 0, (1,), ()))},
            {"args": (*statement.args, Operand(0, "int8", 0, (), (1,)))},
            {"kwargs": (*statement.kwargs, ("x", 1))},
            {"kwargs": (*statement.kwargs, ("y", 1))},
            {"kwargs": (*statement.kwargs, ("y", 2))},
            {"results": (*statement.results, None)},
            {"results": (*statement.results, 0)},
        ):
            changed = replace(statement, **change)
            statements = (*program.statements[:index], changed, *program.statements[index + 1 :])
            found.append(replace(program, statements=statements))
    return found


@settings(max_examples=30)
@given(manifests().flatmap(programs))
def test_the_digest_changes_with_every_field(program: Program) -> None:
    every = [program, *changes(program)]
    assert len({digest_of("p", program_form(each)) for each in every}) == len(every)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, child in items:
        found.append((*path, key))
        if isinstance(child, dict | list):
            found += places(child, (*path, key))
    return found


LISTS = {(2, 0, 1), (2, 0, 2), (2, 1, 1), (2, 1, 2), (2, 1, 3)}  # of any length


@pytest.mark.parametrize("wrong", [None, True, 1.5, -1, [], {}, {"x": 1}])
def test_no_other_kind_of_value_is_taken_anywhere(wrong: Any) -> None:
    for path in places(json.loads(GOLDEN)):
        is_argument = path[0] == 2 and path[2:3] in ((1,), (2,)) and len(path) > 3
        is_result = path[0] == 2 and path[2:3] == (3,) and len(path) > 3
        if is_argument or (is_result and wrong is None) or (path in LISTS and wrong == []):
            continue  # many values are right
        form = json.loads(GOLDEN)
        holder = form
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = wrong
        with pytest.raises(WireFormatError):
            program_of(form)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"AP8="', '"AP9="', "canonical base64"),
        ('"AP8="', '"AP8"', "expected base64"),
        ('"AP8="', '"AA=="', "register 2: expected the 2 bytes"),
        ('{"target":"weight"}', '{"aim":"weight"}', "known kind, found 'aim'"),
        ('{"target":"weight"}', '{"target":"weight","x":1}', "an object with one key"),
        ("[-1,[2]]", "[-1,[[[[[2]]]]]]", "arrays at most 4 deep"),
        ("true", "0.5", "argument: expected an object with one key, found 0.5"),
        ("true", '{"float":"0.1g"}', "hexadecimal float"),
        ("true", '{"layout":"jagged"}', "a literal that this version knows"),
        ("true", '{"device":"cuda:0"}', "a literal that this version knows"),
        ("true", "-99999999999999999999", "at most 64 bits"),
        ('"aten.copy_.default"', '"os.system.default"', "one of torch's own operations"),
        ("4,[3],[2]", "4,[3,1],[2,1]", "canonical"),
    ],
)
def test_bad_programs_are_refused_with_the_place(old: str, new: str, message: str) -> None:
    assert old in GOLDEN
    with pytest.raises(WireFormatError, match=message):
        program_of(json.loads(GOLDEN.replace(old, new, 1)))


def test_a_constant_that_is_too_large_is_not_decoded() -> None:
    form = json.loads(GOLDEN)
    too_many = MAX_CONSTANT_BYTES + 3
    form[1][2]["constant"] = ["int8", [too_many], "A" * (too_many // 3 * 4 + 4)]
    with pytest.raises(WireFormatError, match=r"registers\[2\].*at most 16777216 bytes as base64"):
        program_of(form)
