"""Allocations of a GPU, as its driver names them."""

import pytest
import torch

from rdt_transport.device_memory import allocation_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_tensors_that_torch_cuts_from_one_segment_lie_in_one_allocation() -> None:
    tensors = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(12)]
    segments = {
        (segment["address"], segment["total_size"]) for segment in torch.cuda.memory_snapshot()
    }

    found = {allocation_of(tensor.untyped_storage()) for tensor in tensors}

    assert found <= segments
    assert len(found) < len(tensors)
