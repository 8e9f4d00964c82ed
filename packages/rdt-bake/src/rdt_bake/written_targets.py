"""Which tensors of its module a program writes into; it may only read others."""

from operator import attrgetter
from typing import Any

import torch

from rdt_bake.errors import ReplayError
from rdt_plan.program import Operand, Program, Statement, Target

__all__ = ["written_targets"]


def written_targets(program: Program) -> frozenset[str]:
    """The names of the tensors of ``program.module`` that its statements write into.

    Raises:
        ReplayError: this torch lacks an operation.
    """
    written = set()
    for statement in program.statements:
        try:
            arguments = _written_arguments(statement)
        except AttributeError as error:
            raise ReplayError(f"{program.module}: torch has no {statement.op}") from error
        for operand in _operands(arguments):
            register = program.registers[operand.register]
            if isinstance(register, Target):
                written.add(register.param)
    return frozenset(written)


def _written_arguments(statement: Statement) -> list[Any]:
    schema: Any = attrgetter(statement.op.removeprefix("aten."))(torch.ops.aten)._schema
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    position = {argument.name: at for at, argument in enumerate(schema.arguments)}
    given = dict(statement.kwargs)
    given |= {n: statement.args[position[n]] for n in names if position[n] < len(statement.args)}
    return [given[name] for name in names if name in given]


def _operands(value: Any) -> list[Operand]:
    if isinstance(value, (tuple, list)):
        return [operand for each in value for operand in _operands(each)]
    return [value] if isinstance(value, Operand) else []
