"""Where the benchmark's processes keep their tensors: "cpu", "cuda", or "cuda:1" and the like."""

import torch

__all__ = ["bound", "is_gpu", "name_of", "synchronize"]


def is_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def bound(device: str) -> torch.device:
    """The device with its index; a GPU is this thread's current one from now on."""
    if not is_gpu(device):
        return torch.device(device)
    index = torch.device(device).index or 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def synchronize(device: str) -> None:
    """Wait until a GPU is through with everything."""
    if is_gpu(device):
        torch.cuda.synchronize(torch.device(device))
