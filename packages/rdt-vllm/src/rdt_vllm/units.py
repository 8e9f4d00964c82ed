"""Which modules of a plan are installed together."""

from collections.abc import Sequence

from torch import nn

from rdt_plan import SyncPlan
from rdt_vllm import _vllm
from rdt_vllm.errors import UnsupportedError
from rdt_vllm.layerwise import LayerwiseUnit
from rdt_vllm.ties import Tie

__all__ = ["layerwise_units"]


def layerwise_units(
    model: nn.Module, plan: SyncPlan, ties: Sequence[Tie]
) -> dict[str, LayerwiseUnit]:
    """The unit of every module that ``plan`` writes, by dotted path.

    Modules that share a tensor form one unit, those the plan does not write among them: each one's
    post-processing reads it.

    Raises:
        UnsupportedError: the plan writes into attention, or into a module that the model lacks.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    order = {path: position for position, path in enumerate(paths.values())}
    written: dict[str, set[str]] = {}
    for chunk in plan.chunks:
        for placement in chunk.placements:
            written.setdefault(placement.module, set()).add(placement.param)
    for fill in plan.fills:
        written.setdefault(fill.module, set()).add(fill.param)
    for path in (*plan.modules, *written):
        module = _submodule(model, path)
        if paths[id(module)] != path:
            raise UnsupportedError(
                f"the plan writes into {path!r}, which is {paths[id(module)]!r} under another name"
            )
        if _vllm.is_deferred(module):
            names = ", ".join(sorted(written.get(path, ())))
            raise UnsupportedError(
                f"weights are loaded into attention {path!r} ({names}): scales of a quantised "
                "key-value cache cannot be synced yet; serve with --kv-cache-dtype auto"
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
    units = {
        id(members): LayerwiseUnit(
            {path: _submodule(model, path) for path in members},
            {path: frozenset(written.get(path, ())) for path in members},
            tied.get(id(members), ()),
        )
        for members in group.values()
    }
    return {path: units[id(members)] for path, members in group.items()}


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedError(f"the plan writes into {path!r}, which this model lacks") from error
