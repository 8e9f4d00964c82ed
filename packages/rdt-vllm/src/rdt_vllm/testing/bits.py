"""Tensors compared by their bits, not by their values: zero has two signs, and NaN differs."""

import torch

__all__ = ["first_difference", "flip_byte", "num_bytes", "num_differences", "to_bytes"]


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in their logical order as a 1-D uint8 tensor; a view where memory allows it.

    >>> to_bytes(torch.tensor([[1.0], [-0.0]])).tolist()
    [0, 0, 128, 63, 0, 0, 0, 128]
    """
    dense = tensor.detach().contiguous()
    # A contiguous tensor of one element may have any stride, which a view to bytes refuses.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements, whatever memory they share; also of a meta tensor."""
    return tensor.numel() * tensor.element_size()


def first_difference(left: torch.Tensor, right: torch.Tensor) -> int | None:
    """Offset of the first byte that differs, or None where all bits are equal.

    Shape and dtype must be equal (`ValueError`); the devices may differ.

    >>> first_difference(torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0]))
    7
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(
            f"only tensors of one shape and dtype have comparable bits, found "
            f"{tuple(left.shape)} {left.dtype} and {tuple(right.shape)} {right.dtype}"
        )
    unequal = to_bytes(left) != to_bytes(right).to(left.device)
    return int(unequal.int().argmax()) if bool(unequal.any()) else None


def num_differences(left: torch.Tensor, right: torch.Tensor) -> int:
    """How many bytes differ; the tensors are such as `first_difference` takes."""
    return int((to_bytes(left) != to_bytes(right).to(left.device)).sum())


def flip_byte(tensor: torch.Tensor) -> int:
    """Flip one bit, the last element's sign, in the tensor's own memory; returns its byte's offset.

    Only one byte changes, and changes the value enough for a model's output to show it.
    """
    last = num_bytes(tensor) - 1
    with torch.no_grad():
        changed = to_bytes(tensor).clone()
        changed[last] ^= 0x80
        tensor.copy_(changed.view(tensor.dtype).reshape(tensor.shape))
    return last
