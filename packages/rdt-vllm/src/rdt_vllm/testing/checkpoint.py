"""Checkpoint folders that vLLM serves, written from models in memory."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

__all__ = ["WEIGHTS_FILE", "write_checkpoint", "write_weights"]

WEIGHTS_FILE = "model.safetensors"


def write_checkpoint(model: PreTrainedModel, folder: Path) -> Path:
    """Write ``config.json`` and the weights under the names that checkpoints of its kind have.

    The folder is made when it is missing, and returned. It has no tokenizer: serve it with
    ``skip_tokenizer_init``.
    """
    model.save_pretrained(folder)
    return folder


def write_weights(weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> Path:
    """Write named tensors as the folder's only weights, as they are; returns the folder.

    This is what a trainer sent: the reference that a worker is held against. Tensors that share
    memory are written once each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.safetensors*"):
        stale.unlink()
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder
