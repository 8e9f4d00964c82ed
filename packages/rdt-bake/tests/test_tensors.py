"""Which operations may be taken for views by what they are, whatever they are called with."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from rdt_bake.tensors import always_views, storage_key, tensors_in

aten = torch.ops.aten

# Values for arguments without a default, by the type that the schema gives them.
_FITTING: dict[str, list[Any]] = {
    "Tensor": [torch.empty(4, 4, device="meta").t()],
    "int": [0, 1],
    "SymInt": [0, 1, 2],
    "List[int]": [[0, 1], [1, 0]],
    "List[SymInt]": [[4, 4], [2, 2], [1, 4]],
    "ScalarType": [torch.int32],
}


def view_operations() -> Iterator[Any]:
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in getattr(packet, "overloads", list)():
            func = getattr(packet, overload)
            with suppress(RuntimeError):  # one of TorchScript's own, which nothing dispatches
                if always_views(func):
                    yield func


def results(func: Any) -> Iterator[Any]:
    """Of calls of ``func`` on a transposed tensor, with other arguments that happen to fit."""
    wanted = [a for a in func._schema.arguments if not a.has_default_value()]
    for which in range(3):
        try:
            choices = [_FITTING[str(a.type)] for a in wanted]
            yield func(*(each[min(which, len(each) - 1)] for each in choices))
        except (KeyError, RuntimeError, IndexError, NotImplementedError):
            continue


def test_what_counts_as_a_view_shares_memory_even_with_a_transposed_tensor() -> None:
    (base,) = _FITTING["Tensor"]
    called = set()
    for func in view_operations():
        for result in results(func):
            assert all(storage_key(t) == storage_key(base) for t in tensors_in((result,))), func
            called.add(str(func))
    loaders_use = {"slice.Tensor", "select.int", "unbind.int", "permute.default", "detach.default"}
    assert {f"aten.{name}" for name in loaders_use} <= called


@pytest.mark.parametrize(
    "func",
    [
        aten.reshape.default,
        aten.contiguous.default,
        aten.to.dtype,
        aten.flatten.using_ints,
        aten.clone.default,
        aten._to_copy.default,
        aten.flip.default,
        aten.copy_.default,
        aten.squeeze_.default,
        aten.resize_.default,
    ],
)
def test_what_may_copy_or_write_is_no_view(func: Any) -> None:
    assert not always_views(func)
