"""Which modules of a model are installed together, and how."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from rdt_bake import Recording, written_targets
from rdt_vllm.errors import UnsupportedError
from rdt_vllm.layerwise import LayerwiseUnit
from rdt_vllm.live import LiveUnit
from rdt_vllm.module_tensors import own_tensors
from rdt_vllm.probe import Probe
from rdt_vllm.ties import Tie, find_ties
from rdt_vllm.view_buffers import ViewBuffer, find_view_buffers

__all__ = ["InstallUnit", "InstallUnits"]


class InstallUnit(Protocol):
    """Modules that are installed together: `LayerwiseUnit`, which says more, and `LiveUnit`."""

    modules: dict[str, nn.Module]

    @property
    def is_live(self) -> bool: ...

    @property
    def is_open(self) -> bool: ...

    def open(self) -> None: ...

    def destination(self, path: str, name: str) -> torch.Tensor: ...

    def given(self) -> list[torch.Tensor]: ...

    def processed(self) -> list[tuple[torch.Tensor, torch.Tensor]]: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class InstallUnits:
    """The unit of every module that a recording writes into.

    Modules that share a tensor form one unit, those that are not written among them: each one's
    post-processing reads it. A unit is live when the probe finds no obstacle in any of its modules,
    and nothing else shows or shares their memory in a module that is not live.

    Args:
        model: the worker's model, in kernel form.
        recording: what a sync writes.
        probe: tells which modules may be live; None: none.

    Attributes:
        of: the unit of each module, by dotted path.
        obstacles: why modules are not live, by dotted path.

    Raises:
        UnsupportedError: the recording writes into a module that the model lacks, or into one that
            cannot be filled and post-processed by itself.
    """

    def __init__(self, model: nn.Module, recording: Recording, probe: Probe | None) -> None:
        self._written = _written(recording)
        paths = {id(module): path for path, module in model.named_modules()}
        for path in self._written:
            module = _submodule(model, path)
            if paths[id(module)] != path:
                raise UnsupportedError(
                    f"the plan writes into {path!r}, which is {paths[id(module)]!r} under another "
                    "name"
                )
        groups = _groups(paths, list(self._written), find_ties(model))
        modules = {path: _submodule(model, path) for members, _ in groups for path in members}
        views = find_view_buffers(model, modules.keys())
        self.obstacles = _obstacles(modules, views, probe)
        self.of: dict[str, InstallUnit] = {}
        for members, ties in groups:
            own = {path: modules[path] for path in members}
            unit: InstallUnit
            if any(path in self.obstacles for path in members):
                written = {path: frozenset(self._written.get(path, ())) for path in members}
                unit = LayerwiseUnit(own, written, ties, views)
            else:
                unit = LiveUnit(own)
            self.of.update(dict.fromkeys(members, unit))

    @property
    def all(self) -> tuple[InstallUnit, ...]:
        """Every unit once."""
        return tuple(dict.fromkeys(self.of.values()))

    def live_tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """By (module, name), what a sync writes where kernels read: it never moves."""
        return {
            (path, name): self.of[path].destination(path, name)
            for path, names in self._written.items()
            if self.of[path].is_live
            for name in names
        }

    def summary(self) -> str:
        """How many modules and bytes are installed in which way, and what the obstacles are."""
        live = self.live_tensors()
        num_live = sum(unit.is_live for unit in self.of.values())
        reasons = Counter(self.obstacles.values()).most_common(3)
        because = "; ".join(f"{count} as {reason}" for reason, count in reasons)
        return (
            f"{num_live} modules ({sum(tensor.nbytes for tensor in live.values())} bytes) live, "
            f"{len(self.of) - num_live} layerwise{f' ({because})' if because else ''}"
        )


def _groups(
    paths: Mapping[int, str], written: Sequence[str], ties: Sequence[Tie]
) -> list[tuple[list[str], list[Tie]]]:
    """The modules that form a unit, in the model's order, each time with what ties them."""
    order = {path: position for position, path in enumerate(paths.values())}
    group = {path: [path] for path in written}
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
    unique = {id(members): members for members in group.values()}
    return [(members, tied.get(key, [])) for key, members in unique.items()]


def _obstacles(
    modules: Mapping[str, nn.Module],
    views: Sequence[ViewBuffer],
    probe: Probe | None,
) -> dict[str, str]:
    """Why modules are not live, by path; all that share memory with one that is not are not."""
    if probe is None:
        return dict.fromkeys(modules, "live installing is off")
    found = {path: probe.obstacle(path, module) for path, module in modules.items()}
    obstacles = {path: reason for path, reason in found.items() if reason is not None}
    paths = {id(module): path for path, module in modules.items()}
    for view in views:
        if not view.is_shared:
            apart = [paths[id(each)] for each in (view.owner, view.module) if id(each) in paths]
            reason = f"{view.name} shows what {view.param} was"
            obstacles = {**dict.fromkeys(apart, reason), **obstacles}
    holders: dict[int, list[str]] = {}
    for path, module in modules.items():
        for tensor in own_tensors(module).values():
            if tensor.numel() and not tensor.is_meta:
                holders.setdefault(tensor.untyped_storage().data_ptr(), []).append(path)
    spreads = True
    while spreads:
        spreads = False
        for sharing in holders.values():
            first = next((path for path in sharing if path in obstacles), None)
            for path in sharing if first is not None else ():
                if path not in obstacles:
                    obstacles[path] = f"memory is shared with {first}"
                    spreads = True
    return obstacles


def _written(recording: Recording) -> dict[str, set[str]]:
    """By module, the names of its tensors that a sync writes."""
    written: dict[str, set[str]] = {}
    for write in recording.writes:
        written.setdefault(write.module, set()).add(write.param)
    for program in recording.programs:
        written.setdefault(program.module, set()).update(written_targets(program))
    return written


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedError(f"the plan writes into {path!r}, which this model lacks") from error
