import itertools

import pytest
import torch

from rdt_plan import Manifest, ParamMeta
from rdt_trainer.collector import GroupCollector
from rdt_trainer.errors import SourceError

CPU = torch.device("cpu")
MANIFEST = Manifest.build(
    [
        ParamMeta("embed", "float32", (2, 2), (0, 1)),
        ParamMeta("layers.0.w", "bfloat16", (3,), (0,)),
        ParamMeta("layers.0.b", "bfloat16", (3,), (1,)),
        ParamMeta("layers.1.w", "bfloat16", (3,), (1,)),
        ParamMeta("norm", "float32", (), (0, 1)),
    ]
)
TENSORS = {
    "embed": torch.ones(2, 2),
    "layers.0.w": torch.ones(3, dtype=torch.bfloat16),
    "layers.0.b": torch.zeros(3, dtype=torch.bfloat16),
    "layers.1.w": torch.full((3,), 2.0, dtype=torch.bfloat16),
    "norm": torch.tensor(4.0),
}


def collect(rank: int, items: list) -> list[dict[str, torch.Tensor]]:
    collector = GroupCollector(MANIFEST, rank, iter(items), CPU)
    groups = [g.index for g in MANIFEST.groups if any(_owned(n, rank) for n in g.names)]
    found = [collector.collect(group) for group in groups]
    collector.finish()
    return found


def _owned(name: str, rank: int) -> bool:
    return rank in MANIFEST.param(name).owners


def owned(rank: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in TENSORS.items() if _owned(name, rank)]


@pytest.mark.parametrize(
    ("rank", "names"),
    [
        (0, [["embed"], ["layers.0.w"], ["norm"]]),
        (1, [["embed"], ["layers.0.b"], ["layers.1.w"], ["norm"]]),
    ],
)
def test_each_rank_collects_what_it_owns_group_by_group(rank, names):
    groups = collect(rank, owned(rank))
    assert [list(group) for group in groups] == names
    for group in groups:
        for name, tensor in group.items():
            assert tensor.data_ptr() == TENSORS[name].data_ptr()


def test_parameters_are_detached():
    items = owned(0)
    items[0] = ("embed", torch.nn.Parameter(TENSORS["embed"]))
    assert not collect(0, items)[0]["embed"].requires_grad


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (("norm", TENSORS["norm"]), r"rank 0: .* yielded norm, expected layers\.0\.w.*order"),
        (("extra", TENSORS["norm"]), r"yielded extra, expected layers\.0\.w: extra is not in meta"),
        (
            ("layers.0.w", torch.ones(3)),
            r"layers\.0\.w is float32\[3\], expected bfloat16\[3\]",
        ),
        (
            ("layers.0.w", torch.ones(1, 3, dtype=torch.bfloat16)),
            r"layers\.0\.w is bfloat16\[1, 3\], expected bfloat16\[3\]",
        ),
        (
            (
                "layers.0.w",
                torch.ones(3, dtype=torch.bfloat16).as_subclass(type("T", (torch.Tensor,), {})),
            ),
            r"layers\.0\.w is a T: expected a plain, whole tensor",
        ),
        (
            ("layers.0.w", torch.ones(3, dtype=torch.bfloat16, device="meta")),
            r"rank 0: layers\.0\.w is on meta: expected .* on cpu, .*\.to\('cpu'\).* device='meta'",
        ),
    ],
)
def test_what_was_not_declared_is_refused(item, message):
    items = owned(0)
    items[1] = item
    with pytest.raises(SourceError, match=message):
        collect(0, items)


def test_a_pass_that_ends_early_is_refused():
    with pytest.raises(SourceError, match="ended before norm"):
        collect(0, owned(0)[:-1])


def test_a_pass_that_goes_on_is_refused():
    with pytest.raises(SourceError, match="yielded more after its last"):
        collect(0, [*owned(0), ("more", torch.ones(1))])


def test_errors_of_the_source_pass_through():
    def failing():
        yield from owned(0)[:1]
        raise ZeroDivisionError("gather failed")

    collector = GroupCollector(MANIFEST, 0, failing(), CPU)
    collector.collect(0)
    with pytest.raises(ZeroDivisionError, match="gather failed"):
        collector.collect(1)


@pytest.mark.parametrize("num_groups", [0, 2, 3])
def test_a_pass_without_end_is_discarded_no_further_than_its_names(num_groups):
    yielded = []

    def endless():
        for name, tensor in itertools.cycle(owned(1)):
            yielded.append(name)
            assert len(yielded) < 100
            yield name, tensor

    collector = GroupCollector(MANIFEST, 1, endless(), CPU)
    for group in (0, 1, 2)[:num_groups]:
        collector.collect(group)
    collector.discard()
    assert len(yielded) == len(owned(1)) + 1  # where the end would be


def test_nothing_is_discarded_after_the_last_name():
    items = itertools.cycle(owned(0))
    collector = GroupCollector(MANIFEST, 0, items, CPU)
    for group in (0, 1, 3):
        collector.collect(group)
    with pytest.raises(SourceError, match="yielded embed after its last"):
        collector.finish()
    collector.discard()
    assert next(items)[0] == "layers.0.w"


def test_a_buffer_yielded_twice_is_refused_with_the_group_that_overwrites_it():
    buffer = torch.empty(3, dtype=torch.bfloat16)

    def reusing():
        for name, tensor in owned(1):
            yield name, buffer.copy_(tensor) if tensor.shape == (3,) else tensor

    collector = GroupCollector(MANIFEST, 1, reusing(), CPU)
    collector.collect(0)
    collector.collect(1)
    with pytest.raises(SourceError, match=r"rank 1: layers\.0\.b changed in place.*stay unchanged"):
        collector.collect(2)
