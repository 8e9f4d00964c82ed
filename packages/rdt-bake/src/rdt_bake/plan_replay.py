"""Following a plan into a model's tensors: what any engine does with the chunks that arrive."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rdt_bake.errors import ReplayError
from rdt_bake.execution import run_program
from rdt_bake.replay import apply_fill, apply_placement
from rdt_plan import Chunk, Fill, SyncPlan
from rdt_plan.program import Program
from rdt_plan.staging import is_staging, staging_name

__all__ = ["PlanReplay"]

Staged = Mapping[str, Tensor]
"""By name (`rdt_plan.staging`), the packed elements of a program's inputs: 1-D, uint8."""


class PlanReplay:
    """Writes the syncs of one plan, chunk by chunk, module by module.

    A module is opened before its first placement, and computed after its last one: then all its
    tensors are what the loaders would have made them. An engine that moves modules in and out of
    some other form calls `open`, `place` and `compute`; any other one calls `install` and `finish`.
    Outside autograd, on the caller's thread and stream; not thread-safe.

    Args:
        plan: what each sync brings.
        find: gives the whole tensor at (module, name); asked again for each write.
    """

    def __init__(self, plan: SyncPlan, find: Callable[[str, str], Tensor]) -> None:
        self._plan = plan
        self._find = find
        self._fills: dict[str, list[Fill]] = {}
        for fill in plan.fills:
            self._fills.setdefault(fill.module, []).append(fill)
        self._programs: dict[str, Program] = {each.module: each for each in plan.programs}
        self._staged: dict[str, Staged] = {}

    def open(self, module: str) -> None:
        """Write the module's constants, and get memory for what its program computes from.

        Raises:
            ReplayError: a region leaves its tensor.
        """
        for fill in self._fills.get(module, ()):
            apply_fill(fill, self._find(module, fill.param))
        program = self._programs.get(module)
        if program is not None:
            device = self._device(program)
            self._staged[module] = {
                staging_name(register): torch.empty(
                    slice_.num_bytes, dtype=torch.uint8, device=device
                )
                for register, slice_ in program.inputs
            }

    def place(self, chunk: Chunk, packed: Tensor) -> None:
        """Copy a chunk's packed bytes (uint8, 1-D) to where they go; its modules are open.

        Raises:
            ReplayError: a region leaves its tensor, or a module is not open.
        """
        offsets = dict(zip(chunk.serve.slices, chunk.serve.offsets, strict=True))
        for placement in chunk.placements:
            start = offsets[placement.slice]
            source = packed[start : start + placement.slice.num_bytes]
            apply_placement(placement, source, self._destination(placement.module, placement.param))

    def compute(self, module: str) -> None:
        """Run the module's program, if it has one, and let go of what it computed from.

        Raises:
            ReplayError: the program fails, naming module and operation, or the module is not open.
        """
        program = self._programs.get(module)
        if program is None:
            return
        staged = self._opened(module)
        del self._staged[module]
        run_program(
            program,
            {register: staged[staging_name(register)] for register, _ in program.inputs},
            lambda param: self._find(module, param),
            self._device(program),
        )

    def install(self, chunk: Chunk, packed: Tensor) -> None:
        """All that a chunk brings about: the modules it begins, its bytes, the modules it ends."""
        for module in chunk.materialize:
            self.open(module)
        self.place(chunk, packed)
        for module in chunk.complete:
            self.compute(module)

    def finish(self) -> None:
        """After the last `install` of a sync: the modules for which no byte is read."""
        for module in self._plan.modules_without_chunks:
            self.open(module)
            self.compute(module)

    def abandon(self) -> None:
        """Let go of what an unfinished sync has open; idempotent."""
        self._staged.clear()

    def _destination(self, module: str, param: str) -> Tensor:
        return self._opened(module)[param] if is_staging(param) else self._find(module, param)

    def _opened(self, module: str) -> Staged:
        staged = self._staged.get(module)
        if staged is None:
            raise ReplayError(f"module {module!r} is not open: call open before its first chunk")
        return staged

    def _device(self, program: Program) -> torch.device:
        return self._find(program.module, program.targets[0]).device
