"""A decoder of random weights, and what a loader of tensor parallel size 2 does with it.

Fused like vLLM's layers: q, k, v and gate, up in one parameter of row blocks each, o and down in
column blocks, norms whole.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from rdt_plan import Manifest, ParamMeta, Placement, canonical, contiguous_stride

__all__ = ["DTYPE", "NUM_WORKERS", "Model", "draw"]

DTYPE = torch.bfloat16
NUM_WORKERS = 2

Spot = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of the decoder; every one divides by `NUM_WORKERS`."""

    hidden: int
    intermediate: int
    kv: int
    num_layers: int

    @classmethod
    def of(cls, num_bytes: int) -> "Model":
        """A model of about ``num_bytes`` with the proportions of a 1.7B Qwen3."""
        scale = 2
        while scale < 64 and cls._sized(scale).num_bytes > num_bytes:
            scale *= 2
        layer = cls._sized(scale)
        return layer.with_layers(max(1, round(num_bytes / layer.num_bytes)))

    @classmethod
    def _sized(cls, divisor: int) -> "Model":
        return cls(4096 // divisor, 12288 // divisor, 2048 // divisor, num_layers=1)

    def with_layers(self, num_layers: int) -> "Model":
        return Model(self.hidden, self.intermediate, self.kv, num_layers)

    def shrunk(self, factor: int) -> "Model":
        """As many layers and tensors, every extent ``factor`` times smaller."""
        return Model(
            self.hidden // factor, self.intermediate // factor, self.kv // factor, self.num_layers
        )

    @property
    def num_bytes(self) -> int:
        return sum(param.num_bytes for param in self.manifest().params)

    def manifest(self) -> Manifest:
        """What the trainer holds, whole."""
        matrices = {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (self.kv, self.hidden),
            "self_attn.v_proj": (self.kv, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        return Manifest.build(
            ParamMeta(f"model.layers.{layer}.{name}.weight", "bfloat16", shape)
            for layer in range(self.num_layers)
            for name, shape in matrices.items()
        )

    def parameters(self) -> dict[Spot, torch.Tensor]:
        """One worker's parameters by (module, name), zeros."""
        half = self.hidden // NUM_WORKERS
        matrices = {
            "self_attn.qkv_proj": ((self.hidden + 2 * self.kv) // NUM_WORKERS, self.hidden),
            "self_attn.o_proj": (self.hidden, half),
            "mlp.gate_up_proj": (2 * self.intermediate // NUM_WORKERS, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate // NUM_WORKERS),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        return {
            (f"model.layers.{layer}.{name}", "weight"): torch.zeros(shape, dtype=DTYPE)
            for layer in range(self.num_layers)
            for name, shape in matrices.items()
        }

    def writes(self, worker: int) -> list[Placement]:
        """What worker ``worker``'s loaders do, in their order."""
        fused = {
            "self_attn.q_proj": ("self_attn.qkv_proj", 0),
            "self_attn.k_proj": ("self_attn.qkv_proj", self.hidden // NUM_WORKERS),
            "self_attn.v_proj": ("self_attn.qkv_proj", (self.hidden + self.kv) // NUM_WORKERS),
            "mlp.gate_proj": ("mlp.gate_up_proj", 0),
            "mlp.up_proj": ("mlp.gate_up_proj", self.intermediate // NUM_WORKERS),
        }
        writes = []
        for param in self.manifest().params:
            prefix = ".".join(param.name.split(".")[:3])
            name = param.name.removeprefix(f"{prefix}.").removesuffix(".weight")
            module, first_row = fused.get(name, (name, 0))
            shape, stride = param.shape, contiguous_stride(param.shape)
            start = 0
            if name in fused:
                shape = (shape[0] // NUM_WORKERS, shape[1])
                start = worker * math.prod(shape)
            elif len(shape) == 2:
                shape = (shape[0], shape[1] // NUM_WORKERS)
                start = worker * shape[1]
            landed = contiguous_stride(shape)
            writes.append(
                Placement(
                    slice=canonical(param.name, param.dtype, start, shape, stride),
                    module=f"{prefix}.{module}",
                    param="weight",
                    offset=first_row * landed[0],
                    shape=shape,
                    stride=landed,
                    dtype=param.dtype,
                    source_stride=landed,
                )
            )
        return writes

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every source tensor, drawn one at a time: equal bits in every process."""
        for param in self.manifest().params:
            yield param.name, draw(param)

    def num_wrong(self, worker: int, parameters: Mapping[Spot, torch.Tensor]) -> tuple[int, int]:
        """(elements that differ from what the loaders would have written, elements compared)."""
        wrong = compared = 0
        places = {place.slice.name: place for place in self.writes(worker)}
        for name, source in self.weights():
            place = places[name]
            region = place.slice
            expected = source.as_strided(region.shape, region.stride, region.offset)
            target = parameters[place.module, place.param]
            found = target.as_strided(place.shape, place.stride, place.offset)
            bits = expected.reshape(place.shape).view(torch.int16) != found.view(torch.int16)
            wrong += int(bits.sum())
            compared += bits.numel()
        return wrong, compared


def draw(param: ParamMeta) -> torch.Tensor:
    """Random bits, from the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(param.name.encode()))
    bits = torch.empty(-(-param.num_bytes // 8), dtype=torch.int64)
    return bits.random_(generator=generator).view(DTYPE)[: param.numel].view(param.shape)
