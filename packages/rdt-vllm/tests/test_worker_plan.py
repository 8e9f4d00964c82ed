"""Which tensors of a model a READ may land in."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_vllm.worker_plan import direct_places


def places(**tensors: torch.Tensor) -> set[str]:
    return {name for _, name in direct_places({("m", name): t for name, t in tensors.items()})}


def test_contiguous_memory_that_no_other_tensor_shows() -> None:
    memory = torch.zeros(12)
    assert places(
        whole=torch.zeros(3, 4),
        first=memory[:4],
        second=memory[4:8],
        empty=torch.zeros(0),
        columns=torch.zeros(3, 4)[:, 1:3],
    ) == {"whole", "first", "second"}
    assert places(flat=memory, part=memory[4:8], other=torch.zeros(1)) == {"other"}
    assert places(columns=memory.view(3, 4)[:, 0], last=memory[9:], gap=memory[8:9]) == {"last"}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=6))
def test_they_are_those_that_overlap_no_other(spans: list[tuple[int, int]]) -> None:
    memory = torch.zeros(26)
    tensors = {f"t{i}": memory[at : at + size] for i, (at, size) in enumerate(spans)}
    elements = [set(range(at, at + size)) for at, size in spans]
    alone = {
        f"t{i}"
        for i, mine in enumerate(elements)
        if not any(mine & other for j, other in enumerate(elements) if j != i)
    }
    assert places(**tensors) == alone
