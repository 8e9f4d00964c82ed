"""Where the benchmark's processes keep their tensors: "cpu", "cuda", or "cuda:1" and the like."""

from typing import NamedTuple

import torch

__all__ = ["Devices", "bound", "is_gpu", "name_of", "placed", "synchronize"]


class Devices(NamedTuple):
    """One for each rank of the trainer, and one for each worker."""

    trainers: tuple[str, ...]
    workers: tuple[str, ...]


def placed(device: str, num_gpus: int, num_trainers: int, num_workers: int) -> Devices:
    """Each rank of either side on a GPU of its own; who is alone: trainers first, workers last."""
    if max(num_gpus, num_trainers, num_workers) == 1:
        return Devices((device,), (device,))
    both = tuple(f"{device}:{index}" for index in range(2)) if is_gpu(device) else (device, device)
    return Devices(both[:num_trainers], both[-num_workers:])


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
