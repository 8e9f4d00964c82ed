"""The JSON form of a program, written and strictly read.

JSON's own null, booleans, integers and arrays stand for themselves among arguments. Everything
else is an object with one key that says what it is.
"""

from typing import Any

from rdt_plan._base64 import base64_of, bytes_of
from rdt_plan._fields import array, float_of, integer, integers, rows, string
from rdt_plan._slice_form import slice_form, slice_of
from rdt_plan.errors import PlanError, WireFormatError
from rdt_plan.program import (
    Argument,
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
from rdt_plan.program_rules import MAX_CONSTANT_BYTES, MAX_DEPTH, check_program

__all__ = ["program_form", "program_of"]


def program_form(program: Program) -> tuple[Any, ...]:
    return (
        program.module,
        [_register_form(register) for register in program.registers],
        [_statement_form(statement) for statement in program.statements],
    )


def _register_form(register: Register) -> dict[str, Any]:
    match register:
        case Input(slice_):
            return {"input": slice_form(slice_)}
        case Target(param):
            return {"target": param}
        case Constant(dtype, shape, data):
            return {"constant": (dtype, shape, base64_of(data))}
        case Temporary(dtype, shape, stride):
            return {"temporary": (dtype, shape, stride)}


def _statement_form(statement: Statement) -> tuple[Any, ...]:
    return (
        statement.op,
        [_argument_form(argument) for argument in statement.args],
        [(key, _argument_form(argument)) for key, argument in statement.kwargs],
        statement.results,
    )


def _argument_form(argument: Any) -> Any:
    match argument:
        case tuple():
            return [_argument_form(each) for each in argument]
        case Operand():
            view = argument
            return {"view": (view.register, view.dtype, view.offset, view.shape, view.stride)}
        case Literal(kind, name):
            return {kind: name}
        case float():
            return {"float": float(argument).hex()}
    return argument


def program_of(row: Any) -> Program:
    module, registers, statements = array(row, "program", 3)
    program = Program(
        module=string(module, "module"),
        registers=rows(registers, "registers", _register_of),
        statements=rows(statements, "statements", _statement_of),
    )
    try:
        check_program(program)
    except PlanError as error:
        raise WireFormatError(str(error)) from error
    return program


def _register_of(form: Any) -> Register:
    match _tagged(form, "register"):
        case "input", value:
            return Input(slice_of(value))
        case "target", value:
            return Target(string(value, "target"))
        case "constant", value:
            dtype, shape, data = array(value, "constant", 3)
            data = bytes_of(data, "data", MAX_CONSTANT_BYTES)
            return Constant(string(dtype, "dtype"), integers(shape, "shape"), data)
        case "temporary", value:
            dtype, shape, stride = array(value, "temporary", 3)
            return Temporary(
                string(dtype, "dtype"), integers(shape, "shape"), integers(stride, "stride")
            )
        case kind, _:
            raise WireFormatError(f"register: expected one of a known kind, found {kind!r}")


def _statement_of(row: Any) -> Statement:
    op, args, kwargs, results = array(row, "statement", 4)
    return Statement(
        op=string(op, "op"),
        args=rows(args, "args", _argument_of),
        kwargs=rows(kwargs, "kwargs", _keyword_of),
        results=tuple(
            None if index is None else integer(index, "results")
            for index in array(results, "results")
        ),
    )


def _keyword_of(row: Any) -> tuple[str, Argument]:
    key, value = array(row, "keyword", 2)
    return string(key, "key"), _argument_of(value)


def _argument_of(value: Any, depth: int = 0) -> Argument:
    if value is None or type(value) is bool or type(value) is int:
        return value
    if type(value) is list:
        if depth == MAX_DEPTH:
            raise WireFormatError(f"argument: expected arrays at most {MAX_DEPTH} deep")
        return tuple(_argument_of(each, depth + 1) for each in value)
    match _tagged(value, "argument"):
        case "float", number:
            return float_of(number, "float")
        case "view", view:
            register, dtype, offset, shape, stride = array(view, "view", 5)
            return Operand(
                register=integer(register, "register"),
                dtype=string(dtype, "dtype"),
                offset=integer(offset, "offset"),
                shape=integers(shape, "shape"),
                stride=integers(stride, "stride"),
            )
        case kind, name:
            return Literal(kind, string(name, kind))


def _tagged(form: Any, where: str) -> tuple[str, Any]:
    """The only key of an object, and its value."""
    if type(form) is not dict or len(form) != 1:
        raise WireFormatError(f"{where}: expected an object with one key, found {form!r:.80}")
    ((kind, value),) = form.items()
    return kind, value
