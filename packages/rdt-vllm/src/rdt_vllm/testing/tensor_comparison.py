"""A worker's tensors against a fresh model's, bit for bit."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from rdt_vllm.module_tensors import own_tensors
from rdt_vllm.testing.bits import first_difference, num_bytes, num_differences
from rdt_vllm.testing.module_snapshots import ModuleSnapshots
from rdt_vllm.testing.report import Mismatch

__all__ = ["TensorComparison", "compare_filled", "compare_live", "differ"]

CheckpointForm = Callable[[nn.Module], Mapping[str, torch.Tensor]]
Place = tuple[str, str]  # dotted path of a module, and the tensor's attribute in it


@dataclass(slots=True)
class TensorComparison:
    """Counts and differences of one comparison.

    Attributes:
        bytes_expected: what had to be compared.
        bytes_compared: what was, equal or not.
        mismatches: one for each tensor that differs, is missing or holds nothing.
    """

    bytes_expected: int = 0
    bytes_compared: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)

    def refuse(self, place: Place, reason: str) -> None:
        self.mismatches.append(Mismatch(path(place), None, reason))

    def compare(self, place: Place, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Both as they are: shape, dtype, and then every bit."""
        if found.is_meta or found.numel() == 0:
            self.refuse(place, f"holds no bytes (shape {tuple(found.shape)}, {found.device})")
        elif found.shape != expected.shape or found.dtype != expected.dtype:
            self.refuse(
                place,
                f"expected {tuple(expected.shape)} {expected.dtype}, "
                f"found {tuple(found.shape)} {found.dtype}",
            )
        else:
            self.bytes_compared += num_bytes(found)
            first = first_difference(found, expected)
            if first is not None:
                self.mismatches.append(Mismatch(path(place), first, differ(found, expected)))


def differ(found: torch.Tensor, expected: torch.Tensor) -> str:
    """The extent of a difference: a byte, a chunk or everything."""
    return f"{num_differences(found, expected)} of {num_bytes(found)} bytes differ"


def path(place: Place) -> str:
    """The dotted path of one tensor, as ``named_parameters`` spells it."""
    module, param = place
    return f"{module}.{param}" if module else param


def compare_filled(
    fresh: nn.Module,
    live: nn.Module,
    snapshots: ModuleSnapshots,
    form: CheckpointForm,
    left_alone: Collection[Place] = (),
) -> TensorComparison:
    """Every parameter as it was before post-processing, against ``fresh`` at the same point.

    A parameter that a module shares with another one may have been shown under either.

    Args:
        fresh: has loaded its weights, and has not been post-processed.
        live: the worker's model, in whatever form it serves.
        snapshots: what the worker's modules held once filled.
        form: the tensors of a live module before post-processing (on any device), without those
            that post-processing only ever changes in place. Those may differ in dtype: they are
            compared as the live one's.
        left_alone: parameters that no weight fills, in ``fresh`` either; a worker may leave them
            out.
    """
    result = TensorComparison()
    canonical = {id(module): name for name, module in live.named_modules()}
    shared: dict[int, list[Place]] = {}
    for place, param in _parameters(fresh):
        shared.setdefault(id(param), []).append(place)
    for name, module in live.named_modules():
        result.bytes_expected += sum(
            num_bytes(tensor)
            for param, tensor in form(module).items()
            if isinstance(tensor, nn.Parameter) and (name, param) not in left_alone
        )
    for place, param in _parameters(fresh):
        module = _submodule(live, place[0])
        if module is None:
            result.refuse(place, "the worker's model has no such module")
            continue
        if place in left_alone:
            continue
        kept = place[1] not in form(module)
        if kept:
            live_param = module._parameters.get(place[1])
            result.bytes_expected += 0 if live_param is None else num_bytes(live_param)
        names = [place, *shared[id(param)]]
        found = _first_shown(snapshots, canonical, live, names)
        if found is None:
            result.refuse(place, "its module was not filled (the observer never saw it)")
            continue
        result.compare(place, found, param.to(found.dtype) if kept else param)
    return result


def compare_live(fresh: nn.Module, live: nn.Module) -> TensorComparison:
    """Every parameter and buffer that serves, against a post-processed fresh model's.

    Tensors that post-processing emptied in both are left out: their bits are packed away in the
    kernels' own memory, where only the model's output tells of them.
    """
    result = TensorComparison()
    for name, module in fresh.named_modules():
        serving = _submodule(live, name)
        for param, expected in own_tensors(module).items():
            place = (name, param)
            found = None if serving is None else own_tensors(serving).get(param)
            if found is None:
                result.refuse(place, "the worker's model has no such tensor")
            elif found.numel() or expected.numel():
                result.bytes_expected += num_bytes(expected)
                result.compare(place, found, expected)
    return result


def _parameters(model: nn.Module) -> Iterator[tuple[Place, nn.Parameter]]:
    """Each module's own parameters; one that two modules share comes under both."""
    for name, module in model.named_modules():
        for param, tensor in module._parameters.items():
            if tensor is not None:
                yield (name, param), tensor


def _first_shown(
    snapshots: ModuleSnapshots, canonical: dict[int, str], live: nn.Module, places: list[Place]
) -> torch.Tensor | None:
    for name, param in places:
        module = _submodule(live, name)
        found = None if module is None else snapshots.find(canonical[id(module)], param)
        if found is not None:
            return found
    return None


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
