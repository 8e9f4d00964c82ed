"""Staging: where a program's inputs arrive, as if each were a tensor of the module.

So an input is a slice like any other: deduplicated, cut, packed, routed and placed.
"""

from collections.abc import Iterable, Mapping, Sequence

from rdt_plan.errors import PlanError
from rdt_plan.placement import Placement, Write
from rdt_plan.program import Program
from rdt_plan.program_rules import check_program

__all__ = ["check_programs", "is_staging", "staging_bytes", "staging_name", "stagings"]


def staging_name(register: int) -> str:
    """The tensor that an input arrives in; no attribute has such a name.

    >>> staging_name(3)
    '%3'
    """
    return f"%{register}"


def is_staging(param: str) -> bool:
    """Whether a placement into ``param`` fills an input of a program."""
    return param.startswith("%")


def stagings(program: Program) -> tuple[Placement, ...]:
    """The placements that bring a program's inputs: each packed, as it is."""
    return tuple(
        Placement(
            slice=slice_,
            module=program.module,
            param=staging_name(register),
            offset=0,
            shape=(slice_.numel,),
            stride=(1,),
            dtype=slice_.dtype,
            source_stride=(1,),
        )
        for register, slice_ in program.inputs
    )


def staging_bytes(programs: Iterable[Program]) -> Mapping[str, int]:
    """By module, the bytes of all its inputs, which it holds until its last chunk."""
    return {p.module: sum(slice_.num_bytes for _, slice_ in p.inputs) for p in programs}


def check_programs(programs: Sequence[Program], writes: Sequence[Write]) -> None:
    """Refuse programs that contradict themselves, each other or the plain ``writes``.

    Raises:
        PlanError: names the module.
    """
    targets: set[tuple[str, str]] = set()
    modules: set[str] = set()
    for program in programs:
        check_program(program)
        if program.module in modules:
            raise PlanError(f"program of {program.module!r}: expected one a module, found two")
        modules.add(program.module)
        targets |= {(program.module, param) for param in program.targets}
    # Few names of tensors, and mostly no program: a model's many writes are rarely gone through.
    if not targets and not any(map(is_staging, {write.param for write in writes})):
        return
    for write in writes:
        if is_staging(write.param) or (write.module, write.param) in targets:
            raise PlanError(
                f"{write.module}.{write.param}: expected all writes into what a program reads or "
                f"writes among its statements, and none into its inputs; found {write}"
            )
