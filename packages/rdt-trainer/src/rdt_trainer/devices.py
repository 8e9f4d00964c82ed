"""Where a trainer's tensors may be: on one device, of a kind that is served."""

from collections.abc import Mapping

import torch

from rdt_trainer.errors import SettingsError, SourceError

__all__ = ["check_device", "served_device"]

SERVED = ("cpu", "cuda")


def served_device(
    wanted: torch.device | str | None, stable: Mapping[str, torch.Tensor]
) -> torch.device:
    """The device a rank serves from: ``wanted``, or that of its stable tensors, or the CPU.

    Raises:
        SettingsError: a device that is not served, or that this process does not have.
    """
    if wanted is None:
        return next((tensor.device for tensor in stable.values()), torch.device("cpu"))
    try:
        device = torch.empty(0, device=wanted).device  # "cuda" is that of the current index
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is one
        raise SettingsError(
            f"device is {wanted}, which this process cannot use: {error}; leave device= out, or "
            "name the device of the source's tensors"
        ) from error
    if device.type not in SERVED:
        raise SettingsError(
            f"device is {wanted}: expected 'cpu' or 'cuda', the devices that are served; leave "
            "device= out and yield tensors on the CPU"
        )
    return device


def check_device(name: str, tensor: torch.Tensor, first_name: str, first: torch.Tensor) -> None:
    """Raises `SourceError` for a tensor on another device than the module's ``first``."""
    if tensor.device.type not in SERVED:
        raise SourceError(
            f"{name} is on {tensor.device}: expected a tensor on the CPU or on a CUDA device; "
            "yield tensor.cpu() from the iter_full of a source of your own"
        )
    if tensor.device != first.device:
        raise SourceError(
            f"{name} is on {tensor.device}, and {first_name} on {first.device}: expected a module "
            "on one device; move it there, or yield tensors of one device from the iter_full of a "
            "source of your own"
        )
