"""How checkpoints hold the weight of a quantised linear layer, by the name of a variant."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

__all__ = ["BLOCK", "GROUP", "SCHEMES", "Scheme"]

Tensors = dict[str, torch.Tensor]

# Published checkpoints have 128 of each; the tiny models' shards are no multiple of that.
BLOCK = GROUP = 32
_NIBBLES = 8  # in an int32


@dataclass(frozen=True, slots=True)
class Scheme:
    """One quantisation.

    Attributes:
        title: what a reader of the tables should know.
        config: the checkpoint's ``quantization_config``.
        ignore_key: where that lists the layers that are not quantised; empty where vLLM finds out.
        tensors: of (outputs, inputs), by the suffix that takes the place of ``weight``.
        cache_scales: names of the scales of an attention layer's key-value cache, below it.
    """

    title: str
    config: Mapping[str, Any]
    ignore_key: str
    tensors: Callable[[int, int], Tensors]
    cache_scales: tuple[str, ...] = ()


def _fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def _scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape).add(0.5).to(dtype)


def _packed(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def _int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def _fp8_block(outputs: int, inputs: int) -> Tensors:
    blocks = math.ceil(outputs / BLOCK), math.ceil(inputs / BLOCK)
    return {"weight": _fp8(outputs, inputs), "weight_scale_inv": _scales(*blocks)}


def _fp8_tensor(outputs: int, inputs: int) -> Tensors:
    return {"weight": _fp8(outputs, inputs), "weight_scale": _scales(), "input_scale": _scales()}


def _fp8_channel(outputs: int, inputs: int) -> Tensors:
    scales = _scales(outputs, 1, dtype=torch.bfloat16)
    return {"weight": _fp8(outputs, inputs), "weight_scale": scales}


def _fp8_tensor_of_one(outputs: int, inputs: int) -> Tensors:
    return {"weight": _fp8(outputs, inputs), "weight_scale": _scales(1), "input_scale": _scales(1)}


def _int8_channel(outputs: int, inputs: int) -> Tensors:
    return {
        "weight": _int8(outputs, inputs),
        "weight_scale": _scales(outputs, 1, dtype=torch.bfloat16),
    }


def _int8_static(outputs: int, inputs: int) -> Tensors:
    return {
        "weight": _int8(outputs, inputs),
        "weight_scale": _scales(1),
        "input_scale": _scales(1),
        "input_zero_point": _int8(1),
    }


def _w4a16(outputs: int, inputs: int) -> Tensors:
    return {
        "weight_packed": _packed(outputs, inputs // _NIBBLES),
        "weight_scale": _scales(outputs, inputs // GROUP, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def _w4a16_zero_points(outputs: int, inputs: int) -> Tensors:
    zero_points = _packed(outputs // _NIBBLES, inputs // GROUP)
    return _w4a16(outputs, inputs) | {"weight_zero_point": zero_points}


def _awq(outputs: int, inputs: int, group: int = GROUP) -> Tensors:
    return {
        "qweight": _packed(inputs, outputs // _NIBBLES),
        "qzeros": _packed(inputs // group, outputs // _NIBBLES),
        "scales": _scales(inputs // group, outputs, dtype=torch.bfloat16),
    }


def _gptq(outputs: int, inputs: int) -> Tensors:
    return {
        "qweight": _packed(inputs // _NIBBLES, outputs),
        "qzeros": _packed(inputs // GROUP, outputs // _NIBBLES),
        "scales": _scales(inputs // GROUP, outputs, dtype=torch.bfloat16),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def _compressed(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, **more: Any
) -> Mapping[str, Any]:
    def filled(args: Mapping[str, Any]) -> dict[str, Any]:
        return {"dynamic": False, "symmetric": True, "type": "int", "num_bits": 8, **args}

    group = {
        "targets": ["Linear"],
        "weights": filled(weights),
        "input_activations": None if inputs is None else filled(inputs),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        **more,
    }


_FP8_TENSOR = {"type": "float", "strategy": "tensor"}
_FP8_CACHE = {**_FP8_TENSOR, "num_bits": 8, "dynamic": False, "symmetric": True}
_W4_GROUP = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
_AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "zero_point": True}

SCHEMES: Mapping[str, Scheme] = {
    "fp8block": Scheme(
        "fp8 in blocks with `weight_scale_inv`, as DeepSeek V3",
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "modules_to_not_convert",
        _fp8_block,
    ),
    "fp8": Scheme(
        "fp8 with a `weight_scale` and an `input_scale` a tensor, and scales of an fp8 cache",
        {"quant_method": "fp8", "activation_scheme": "static"},
        "ignored_layers",
        _fp8_tensor,
        ("k_proj.k_scale", "v_proj.v_scale"),
    ),
    "ctfp8": Scheme(
        "compressed-tensors: as `@fp8`, under its own names",
        _compressed("float-quantized", _FP8_TENSOR, _FP8_TENSOR, kv_cache_scheme=_FP8_CACHE),
        "ignore",
        _fp8_tensor_of_one,
        ("k_scale", "v_scale"),
    ),
    "ctfp8dynamic": Scheme(
        "compressed-tensors: fp8 with a scale a channel, activations as they come",
        _compressed(
            "float-quantized",
            {"type": "float", "strategy": "channel"},
            {"type": "float", "strategy": "token", "dynamic": True},
        ),
        "ignore",
        _fp8_channel,
    ),
    "int8": Scheme(
        "compressed-tensors: int8 with a scale a channel, activations as they come",
        _compressed(
            "int-quantized", {"strategy": "channel"}, {"strategy": "token", "dynamic": True}
        ),
        "ignore",
        _int8_channel,
    ),
    "int8static": Scheme(
        "compressed-tensors: int8 with a scale a tensor, `input_scale` and `input_zero_point`",
        _compressed(
            "int-quantized", {"strategy": "tensor"}, {"strategy": "tensor", "symmetric": False}
        ),
        "ignore",
        _int8_static,
    ),
    "w4a16": Scheme(
        "compressed-tensors: packed int4 in groups, with `weight_shape`",
        _compressed("pack-quantized", _W4_GROUP, None),
        "ignore",
        _w4a16,
    ),
    "w4a16zp": Scheme(
        "as `@w4a16`, with packed zero points",
        _compressed("pack-quantized", {**_W4_GROUP, "symmetric": False}, None),
        "ignore",
        _w4a16_zero_points,
    ),
    "w4a16kv": Scheme(
        "as `@w4a16`, with scales of an fp8 cache",
        _compressed("pack-quantized", _W4_GROUP, None, kv_cache_scheme=_FP8_CACHE),
        "ignore",
        _w4a16,
        ("k_scale", "v_scale"),
    ),
    "awq": Scheme(
        "AWQ: packed int4 with `qzeros`",
        {**_AWQ, "group_size": GROUP},
        "modules_to_not_convert",
        _awq,
    ),
    "awq16": Scheme(
        "as `@awq`, in groups so small that vLLM unpacks experts and packs them anew as it loads",
        {**_AWQ, "group_size": GROUP // 2},
        "modules_to_not_convert",
        partial(_awq, group=GROUP // 2),
    ),
    "gptq": Scheme(
        "GPTQ: packed int4 with `qzeros` and `g_idx`",
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
            "checkpoint_format": "gptq",
        },
        "",
        _gptq,
    ),
}
