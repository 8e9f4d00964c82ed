import itertools

import pytest
import torch

from rdt_plan import Manifest, ParamMeta
from rdt_trainer.collector import GroupCollector
from rdt_trainer.errors import SourceError
from rdt_trainer.source import adapt

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


# ---- tensors that are not in the pass ----------------------------------------------------------


class Passes:
    """A source whose stable tensors are in no pass; ``asked``: what `iter_rest` was given."""

    def __init__(self, *stable: str) -> None:
        self.stable = {name: TENSORS[name] for name in stable}
        self.asked: list[set[str]] = []

    @property
    def metadata(self):
        return MANIFEST.params

    def stable_tensors(self):
        return self.stable

    def iter_full(self):
        raise AssertionError("there is iter_rest")

    def iter_rest(self, stable):
        self.asked.append(set(stable))
        return ((name, tensor) for name, tensor in owned(0) if name not in stable)


@pytest.mark.parametrize(
    "stable", [("embed",), ("layers.0.w", "norm"), ("embed", "layers.0.w", "norm")]
)
def test_stable_tensors_are_in_no_pass_of_a_source_that_can_leave_them_out(stable):
    source = Passes(*stable)
    collector = GroupCollector.of(adapt(source, num_producers=2), MANIFEST, 0, CPU)
    assert collector.standing is source.stable  # known before the source is asked again
    source.stable = dict(source.stable)
    collector.confirm()
    for group in (0, 1, 3):
        ((name, tensor),) = collector.collect(group).items()
        assert tensor.data_ptr() == TENSORS[name].data_ptr()
    collector.finish()
    collector.check_unchanged()
    assert source.asked == [set(stable)]
    assert collector.standing is source.stable


def test_copies_are_made_before_anything_is_served():
    class Copies(Passes):
        num_filled = 0

        def fill_stable_tensors(self):
            self.num_filled += 1

    source = Copies("embed")
    adapted = adapt(source, num_producers=2)
    for number in (1, 2):
        GroupCollector.of(adapted, MANIFEST, 0, CPU)
        assert source.num_filled == number


def test_a_source_without_such_passes_is_iterated_whole():
    class Whole(Passes):
        iter_rest = None

        def iter_full(self):
            return iter(owned(0))

    collector = GroupCollector.of(adapt(Whole("embed"), num_producers=2), MANIFEST, 0, CPU)
    assert not collector.standing
    assert list(collector.collect(0)) == ["embed"]


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (("embed",), r"rank 0: norm is no longer among"),
        (("embed", "norm", "layers.0.w"), r"rank 0: layers\.0\.w is among"),
    ],
)
def test_other_stable_names_than_at_first_are_refused(later, message):
    source = Passes("embed", "norm")
    adapted = adapt(source, num_producers=2)
    source.stable = {name: TENSORS[name] for name in later}
    collector = GroupCollector.of(adapted, MANIFEST, 0, CPU)
    with pytest.raises(SourceError, match=message):
        collector.confirm()


def test_a_source_that_changes_its_stable_tensors_when_asked_is_told_in_the_end():
    source = Passes("embed")
    source.stable = {"embed": torch.ones(2, 2)}
    collector = GroupCollector.of(adapt(source, num_producers=2), MANIFEST, 0, CPU)
    source.stable["embed"].add_(1)  # they may be read already
    collector.confirm()
    with pytest.raises(SourceError, match="rank 0: embed changed in place"):
        collector.check_unchanged()


def test_what_changed_before_a_source_said_where_its_tensors_are_is_told():
    source = Passes("embed")
    source.stable = {"embed": torch.ones(2, 2)}
    collector = GroupCollector.of(adapt(source, num_producers=2), MANIFEST, 0, CPU)
    source.stable["embed"].add_(1)  # they may be read already
    source.stable = dict(source.stable)
    with pytest.raises(SourceError, match="rank 0: embed changed in place"):
        collector.confirm()


def test_what_changes_after_a_source_said_where_its_tensors_are_is_told():
    source = Passes("embed")
    source.stable = {"embed": torch.ones(2, 2)}
    collector = GroupCollector.of(adapt(source, num_producers=2), MANIFEST, 0, CPU)
    source.stable = {"embed": source.stable["embed"].data}  # which counts its changes for itself
    collector.confirm()
    source.stable["embed"].add_(1)
    with pytest.raises(SourceError, match="rank 0: embed changed in place"):
        collector.check_unchanged()


def test_a_pass_that_never_began_is_discarded_without_the_stable_ones():
    source = Passes("embed")
    collector = GroupCollector.of(adapt(source, num_producers=2), MANIFEST, 0, CPU)
    source.stable = {name: TENSORS[name] for name in ("embed", "norm")}  # asked for once more
    collector.discard()
    assert source.asked == [{"embed", "norm"}]


def test_a_stable_tensor_that_changes_is_told_in_the_end():
    standing = {"embed": torch.ones(2, 2)}
    rest = iter(item for item in owned(0) if item[0] not in standing)
    collector = GroupCollector(MANIFEST, 0, rest, CPU, standing=standing)
    standing["embed"].add_(1)
    for group in (0, 1, 3):
        collector.collect(group)
    for check in (collector.finish, collector.check_unchanged):
        with pytest.raises(SourceError, match="rank 0: embed changed in place"):
            check()


@pytest.mark.parametrize("num_groups", [0, 1, 2, 3])
def test_what_is_left_of_a_pass_without_the_stable_ones_is_discarded(num_groups):
    standing = {"layers.0.b": TENSORS["layers.0.b"]}
    items = itertools.cycle(item for item in owned(1) if item[0] not in standing)
    collector = GroupCollector(MANIFEST, 1, items, CPU, standing=standing)
    for group in (0, 1, 2)[:num_groups]:
        collector.collect(group)
    collector.discard()
    assert next(items)[0] == "layers.1.w"  # three names, and where the end would be


def test_the_last_groups_change_is_told_at_the_end_of_the_pass():
    items = [(name, tensor.clone()) for name, tensor in owned(0)]
    collector = GroupCollector(MANIFEST, 0, iter(items), CPU)
    for group in (0, 1, 3):
        collector.collect(group)
    items[-1][1].add_(1)
    with pytest.raises(SourceError, match="norm changed in place"):
        collector.finish()


# ---- pieces --------------------------------------------------------------------------------------

ROWS = {"owners": (0, 1), "mesh_shape": (2,), "placements": ("shard(0)",)}
CUT = Manifest.build(
    [
        ParamMeta("embed", "float32", (3, 2), **ROWS),
        ParamMeta("layers.0.w", "float32", (1, 2), **ROWS),  # rank 1 holds nothing of this group
        ParamMeta("layers.1.w", "float32", (1, 2), **ROWS),
        ParamMeta("layers.1.b", "float32", (4,), **ROWS),
        ParamMeta("norm", "float32", (1,), **ROWS),
    ]
)
PIECES = [("embed", torch.ones(1, 2)), ("layers.1.b", torch.ones(2))]  # of rank 1
EMPTY = {name: torch.ones(0) for name in ("layers.0.w", "layers.1.w", "norm")}


def pieces(with_empty: bool) -> list[tuple[str, torch.Tensor]]:
    held = dict(PIECES)
    names = [param.name for param in CUT.params if with_empty or param.name in held]
    return [(name, held.get(name, EMPTY.get(name))) for name in names]


@pytest.mark.parametrize("with_empty", [True, False])
def test_pieces_are_collected_and_empty_ones_may_be_yielded(with_empty):
    collector = GroupCollector(CUT, 1, iter(pieces(with_empty)), CPU)
    assert [list(collector.collect(group)) for group in (0, 2)] == [["embed"], ["layers.1.b"]]
    collector.finish()


@pytest.mark.parametrize("num_groups", [0, 1, 2])
def test_empty_pieces_are_discarded_with_the_others(num_groups):
    items = iter(pieces(with_empty=True))
    collector = GroupCollector(CUT, 1, items, CPU)
    for group in (0, 2)[:num_groups]:
        collector.collect(group)
    collector.discard()
    assert next(items, None) is None


@pytest.mark.parametrize(
    ("rank", "item", "message"),
    [
        (0, ("embed", torch.ones(3, 2)), r"rank 0: embed is float32\[3, 2\], expected .*\[2, 2\]"),
        (1, ("layers.0.w", torch.ones(1, 2)), r"rank 1: .* yielded layers\.0\.w, expected embed"),
    ],
)
def test_another_piece_than_the_mesh_says_is_refused(rank, item, message):
    with pytest.raises(SourceError, match=message):
        GroupCollector(CUT, rank, iter([item]), CPU).collect(0)
