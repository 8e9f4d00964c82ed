"""Checkpoints of tiny models with random weights."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from census.configs import BACKENDS, json_overrides, override, small_config, transformers_class
from census.models import HOW
from census.published_names import ADDED, RENAMES, TRANSPOSED
from census.quantised_checkpoint import QUANTISED, equal_to, quantise
from census.registration import register
from census.variants import split_variant
from census.vllm_only_checkpoint import unfused_weights
from census.vllm_only_configs import VLLM_ONLY
from rdt_vllm.testing.checkpoint import write_weights

__all__ = ["can_be_built", "drawn", "has_experts", "make_known", "read", "write"]

Weights = Mapping[str, torch.Tensor]

_EXPERT_KEYS = frozenset(
    {"num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"}
)


def can_be_built(name: str) -> bool:
    """Whether there is anything to build a checkpoint of ``name`` from."""
    arch, _ = split_variant(name)
    return arch in VLLM_ONLY or transformers_class(arch) is not None


def write(name: str, folder: Path) -> None:
    """Write ``config.json`` and the weights; ``name`` may carry a variant.

    The names and layouts of tensors are those of ``save_pretrained``, spelled as published
    checkpoints do. A process can do this once.
    """
    arch, variant = split_variant(name)
    folder.mkdir(parents=True, exist_ok=True)
    if arch in VLLM_ONLY:
        make_known(arch)
        weights = unfused_weights(arch, folder)
    else:
        weights = _saved(name, arch, variant, folder)
    if variant != "statedict":
        weights = _respelled(weights, arch)
    if variant == "fp32":
        weights = {n: t.float() if t.is_floating_point() else t for n, t in weights.items()}
    if variant in QUANTISED:
        weights = quantise(weights, variant, folder)
    write_weights(weights.items(), folder)


def make_known(name: str) -> None:
    """Let transformers read the config.json of an architecture that only vLLM has."""
    arch, _ = split_variant(name)
    if arch in VLLM_ONLY:
        register(arch)


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, in the order of the files."""
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            weights.update({name: file.get_tensor(name) for name in file.keys()})
    return weights


def drawn(weights: Weights, seed: int) -> dict[str, torch.Tensor]:
    """Weights like these with values drawn from ``seed``.

    What is positive stays so, and integers stay in their range; those of 64 bits stay what they
    are: they are sizes and indices.
    """
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator) * 0.05
            is_positive = bool((tensor.float() > 0).all())
            tensor = (noise.abs() if is_positive else noise).to(tensor.dtype)
        elif tensor.dtype in (torch.int8, torch.uint8, torch.int32) and tensor.numel():
            low, high = int(tensor.min()), int(tensor.max())
            tensor = torch.randint(
                low, high + 1, tensor.shape, dtype=tensor.dtype, generator=generator
            )
        values[name] = values.get(equal_to(name), tensor)
    return values


def has_experts(folder: Path) -> bool:
    """Whether the configuration, or a sub-configuration, asks for routed experts."""

    def search(node: dict[str, Any]) -> bool:
        return any(
            search(value) if isinstance(value, dict) else key in _EXPERT_KEYS and bool(value)
            for key, value in node.items()
        )

    return search(json.loads((folder / "config.json").read_text()))


def _saved(name: str, arch: str, variant: str, folder: Path) -> Weights:
    """The weights that transformers saves; ``config.json`` is left in the folder."""
    model = transformers_class(arch)._from_config(small_config(name), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(std=0.05, generator=generator)
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": [BACKENDS.get(arch, arch)]}
    if arch in BACKENDS:
        config[HOW] = "transformers"
    override(config, json_overrides(arch))
    path.write_text(json.dumps(config, indent=1))
    if variant != "statedict":
        return read(folder)
    tied: set[str] = set()
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        tied = set(model._tied_weights_keys or ())
    return {n: tensor for n, tensor in model.state_dict().items() if n not in tied}


def _respelled(weights: Weights, arch: str) -> Weights:
    everyone = () if arch in VLLM_ONLY else RENAMES["*"]
    rules = [*everyone, *RENAMES.get(arch, ())]
    respelled = {}
    for name, tensor in weights.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        if arch in TRANSPOSED and re.search(TRANSPOSED[arch], name):
            tensor = tensor.transpose(-1, -2).contiguous()
        if name:
            respelled[name] = tensor
    added = {name: torch.zeros(shape) for name, shape in ADDED.get(arch, {}).items()}
    return respelled | added
