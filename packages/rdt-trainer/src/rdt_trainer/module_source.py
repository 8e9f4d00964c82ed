"""A torch module as a weight source."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rdt_plan.groups import group_ordered
from rdt_trainer.errors import SourceError
from rdt_trainer.source import SourceMeta, check_device

__all__ = ["ModuleSource"]

# Segments that torch.compile, FSDP and activation checkpointing put into the names they wrap.
WRAPPER_SEGMENTS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
FLAT_PARAMETER = "_flat_param"


class ModuleSource:
    """Serves the parameters of any ``nn.Module``, frozen ones included; a `WeightSource`.

    Names lose the segments that wrappers add. Tied parameters appear once, under the first of
    their names. Each pass yields tensors detached, contiguous and whole: the ranks of a
    ``DTensor``'s mesh gather it together (FSDP2, tensor parallelism), one parameter at a time, in
    metadata order. The mesh's ranks are taken to be the trainer's ranks.

    Args:
        module: read again in every pass, so its parameters may be replaced, but not renamed.
        names: maps a module's name to its checkpoint name, or to None to leave it out.
        extra_names: further checkpoint names, each for one that is served already, such as
            ``{"lm_head.weight": "model.embed_tokens.weight"}`` where these are tied.
        dtype: serve floating-point parameters of 16 bits or more as this dtype, so fp32 masters
            as bf16; a parameter is cast when it is yielded. Or a function from checkpoint name to
            dtype, None for its own: for the few that the checkpoint keeps in fp32.
        persistent_buffers: serve these too.

    Raises:
        SourceError: names that collide, extra names of nothing, FSDP1's flat parameters, or
            parameters that are not on the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        names: Callable[[str], str | None] | None = None,
        extra_names: Mapping[str, str] | None = None,
        dtype: torch.dtype | Callable[[str], torch.dtype | None] | None = None,
        persistent_buffers: bool = False,
    ) -> None:
        self._module = module
        self._names = names
        self._extra_names = dict(extra_names or {})
        self._dtype = dtype
        self._persistent_buffers = persistent_buffers

    @cached_property
    def metadata(self) -> list[SourceMeta]:
        """Every parameter, group by group; described once, without gathering anything."""
        tensors = self._tensors()
        return [
            SourceMeta(
                name,
                self._served_dtype(name, tensors[name]),
                tuple(tensors[name].shape),
                _mesh_ranks(tensors[name]),
            )
            for name in group_ordered(tensors)
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the parameters this rank holds; see `WeightSource.iter_full`."""
        order = [meta.name for meta in self.metadata]
        tensors = self._tensors()
        if missing := next((name for name in order if name not in tensors), None):
            raise SourceError(
                f"{missing} is no longer in the module: expected the {len(order)} names it had "
                "when the trainer was initialised; build a new source and trainer"
            )
        for name in order:
            tensor = tensors[name]
            if _is_member(tensor):
                yield name, self._whole(name, tensor)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for module_name, tensor in self._walk():
            name = _unwrapped(module_name)
            if name.rpartition(".")[2] == FLAT_PARAMETER:
                raise SourceError(
                    f"{module_name} is FSDP1's flat parameter, which has no checkpoint names: "
                    "expected FSDP2 (fully_shard), whose parameters keep theirs"
                )
            mapped = self._names(name) if self._names else name
            if mapped is None:
                continue
            if mapped in found:
                raise SourceError(
                    f"two parameters are both named {mapped} (one of them {module_name}): "
                    "expected distinct checkpoint names; check names="
                )
            if tensor.is_meta:
                raise SourceError(
                    f"{module_name} is on the meta device: expected a parameter with data; "
                    "materialise the module first"
                )
            check_device(module_name, tensor)
            found[mapped] = tensor
        for extra, name in self._extra_names.items():
            if extra in found or name not in found:
                problem = "is served already" if extra in found else f"repeats {name}, not served"
                raise SourceError(
                    f"extra name {extra} {problem}: expected a new name for one of the "
                    f"{len(found)} names the module has"
                )
            found[extra] = found[name]
        return found

    def _walk(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._module.named_parameters()
        if not self._persistent_buffers:
            return
        transient = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self._module.named_modules()
            for name in module._non_persistent_buffers_set
        }
        yield from ((n, b) for n, b in self._module.named_buffers() if n not in transient)

    def _served_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        wanted = self._dtype(name) if callable(self._dtype) else self._dtype
        castable = tensor.is_floating_point() and tensor.element_size() >= 2
        return tensor.dtype if wanted is None or not castable else wanted

    @torch.no_grad()
    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        # Cast before gathering: a bf16 gather of fp32 shards moves half the bytes.
        tensor = tensor.detach().to(self._served_dtype(name, tensor))
        gather: Any = getattr(tensor, "full_tensor", None)
        return (gather() if callable(gather) else tensor).contiguous()


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def _mesh_ranks(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The ranks a DTensor is spread over; None for a plain tensor, which every rank has."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    return None if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))


def _is_member(tensor: torch.Tensor) -> bool:
    mesh: Any = getattr(tensor, "device_mesh", None)
    return mesh is None or mesh.get_coordinate() is not None
