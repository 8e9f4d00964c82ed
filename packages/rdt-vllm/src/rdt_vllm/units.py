"""Which modules of a plan are installed together."""

from collections.abc import Sequence

from torch import nn

from rdt_bake import written_targets
from rdt_plan import SyncPlan, is_staging
from rdt_vllm.errors import UnsupportedError
from rdt_vllm.layerwise import LayerwiseUnit
from rdt_vllm.ties import Tie
from rdt_vllm.view_buffers import find_view_buffers

__all__ = ["layerwise_units"]


def layerwise_units(
    model: nn.Module, plan: SyncPlan, ties: Sequence[Tie]
) -> dict[str, LayerwiseUnit]:
    """The unit of every module that ``plan`` writes, by dotted path.

    Modules that share a tensor form one unit, those the plan does not write among them: each one's
    post-processing reads it.

    Raises:
        UnsupportedError: the plan writes into a module that the model lacks, or into one that
            cannot be filled and post-processed by itself.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    order = {path: position for position, path in enumerate(paths.values())}
    written = _written(plan)
    for path in (*plan.modules, *written):
        module = _submodule(model, path)
        if paths[id(module)] != path:
            raise UnsupportedError(
                f"the plan writes into {path!r}, which is {paths[id(module)]!r} under another name"
            )
    group = {path: [path] for path in dict.fromkeys((*plan.modules, *written))}
    tied: dict[int, list[Tie]] = {}
    for tie in ties:
        sharing = [paths[id(module)] for module, _ in tie]
        if not any(path in group for path in sharing):
            continue
        members = {member for path in sharing for member in group.get(path, [path])}
        merged = sorted(members, key=order.__getitem__)
        merged_ties = [tie]
        for old in {id(group[path]): group[path] for path in sharing if path in group}.values():
            merged_ties += tied.pop(id(old), [])
        for path in merged:
            group[path] = merged
        tied[id(merged)] = merged_ties
    views = find_view_buffers(model, group.keys())
    units = {
        id(members): LayerwiseUnit(
            {path: _submodule(model, path) for path in members},
            {path: frozenset(written.get(path, ())) for path in members},
            tied.get(id(members), ()),
            views,
        )
        for members in group.values()
    }
    return {path: units[id(members)] for path, members in group.items()}


def _written(plan: SyncPlan) -> dict[str, set[str]]:
    """By module, the names of its tensors that a sync writes."""
    written: dict[str, set[str]] = {}
    for chunk in plan.chunks:
        for placement in chunk.placements:
            if not is_staging(placement.param):
                written.setdefault(placement.module, set()).add(placement.param)
    for fill in plan.fills:
        written.setdefault(fill.module, set()).add(fill.param)
    for program in plan.programs:
        written.setdefault(program.module, set()).update(written_targets(program))
    return written


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedError(f"the plan writes into {path!r}, which this model lacks") from error
