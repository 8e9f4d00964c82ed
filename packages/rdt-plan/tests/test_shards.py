from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rdt_plan import (
    OwnershipError,
    ParamMeta,
    Placement,
    Slice,
    SliceError,
    canonical,
    check_bounds,
    contiguous_stride,
    item_bytes,
    whole,
)
from rdt_plan.shards import cut_at_borders
from rdt_plan.slices import last_element
from rdt_plan.testing import (
    elements,
    over_a_mesh,
    pack_slice,
    param_metas,
    piece_bytes,
    place,
    placements,
    slices,
)

RANKS = range(6)


@st.composite
def any_slices(draw: st.DrawFn, meta: ParamMeta) -> Slice:
    """A region as a loader makes it, or any region of any view, across rows and out of step."""
    if draw(st.booleans()):
        return draw(slices(meta))
    dtype = draw(st.sampled_from((meta.dtype, meta.dtype, "uint8", "bfloat16", "float32")))
    room = meta.num_bytes // item_bytes(dtype) - 1
    assume(room >= 0)
    offset = draw(st.integers(0, room))
    shape, stride = [], []
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(1, max((room - offset) // 2, 1)))
        left = room - last_element(offset, shape, stride)
        shape.append(draw(st.integers(1, min(left // step, 5) + 1)))
        stride.append(step)
    return canonical(meta.name, dtype, offset, shape, stride)


@st.composite
def any_placements(draw: st.DrawFn, slice_: Slice) -> Placement:
    """In order, repeating, or any strided reading of the packed elements."""
    copy = draw(placements(slice_))
    if draw(st.integers(0, 2)):
        return copy
    shape = draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    steps = []
    for extent in shape:
        left = slice_.numel - 1 - last_element(0, shape[: len(steps)], steps)
        steps.append(draw(st.integers(0, left // max(extent - 1, 1))))
    return Placement(
        slice_, "m", "p", 1, shape, contiguous_stride(shape), slice_.dtype, tuple(steps)
    )


def destination(copy: Placement) -> bytearray:
    last = 0 if 0 in copy.shape else last_element(copy.offset, copy.shape, copy.stride)
    return bytearray((last + 1) * item_bytes(copy.dtype))


@given(st.data())
def test_pieces_of_any_owners_write_what_the_uncut_slice_writes(data: st.DataObject) -> None:
    meta = data.draw(over_a_mesh(data.draw(param_metas()), RANKS))
    slice_ = data.draw(any_slices(meta))
    assume(slice_.numel)
    copies = data.draw(st.lists(any_placements(slice_), min_size=1, max_size=3))
    copies = [copy._replace(param=f"p{number}") for number, copy in enumerate(copies)]
    source = bytes(i % 251 + 1 for i in range(meta.num_bytes))
    expected = {copy.param: destination(copy) for copy in copies}
    for copy in copies:
        place(copy, pack_slice(slice_, source), expected[copy.param])

    try:
        pieces = cut_at_borders(slice_, copies, meta)
    except SliceError as error:
        assert item_bytes(slice_.dtype) > item_bytes(meta.dtype)
        assert "expected pieces of whole" in str(error)
        return

    found = {copy.param: destination(copy) for copy in copies}
    read = Counter()
    grid = meta.grid
    assert grid is not None
    for cell, (piece, parts) in pieces:
        rank = data.draw(
            st.sampled_from([r for r, c in zip(meta.owners, grid.cells, strict=True) if c == cell])
        )
        held = meta.held_by(rank)
        assert held is not None
        check_bounds(piece, held)
        packed = pack_slice(piece, piece_bytes(meta, rank, source))
        for part in parts:
            assert part.slice == piece
            place(part, packed, found[part.param])
        read.update((cell, e) for e in elements(piece.offset, piece.shape, piece.stride))
    assert found == expected
    if len(set(elements(slice_.offset, slice_.shape, slice_.stride))) == slice_.numel:
        assert set(read.values()) == {1}
    assert sum(piece.numel for _, (piece, _) in pieces) <= slice_.numel


def copy_of(source: Slice, shape: tuple[int, ...], stride: tuple[int, ...]) -> Placement:
    return Placement(source, "m", "p", 0, shape, stride, source.dtype, contiguous_stride(shape))


def cells(pieces) -> list[tuple[int, ...]]:
    return [cell for cell, _ in pieces]


ROWS = ParamMeta("w", "int8", (12, 6), (0, 1, 2), (3,), ("shard(0)",))
COLUMNS = ParamMeta("w", "int8", (12, 6), (0, 1, 2), (3,), ("shard(1)",))


@pytest.mark.parametrize("meta", [ROWS, COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [
        (0, (12, 6), (6, 1)),
        (0, (6, 12), (1, 6)),
        (7, (10, 4), (6, 1)),
        (0, (6, 6), (12, 1)),
        (0, (2, 12, 3), (3, 6, 1)),
    ],
    ids=["whole", "transposed", "narrowed", "every other row", "halves of rows"],
)
def test_usual_slices_are_one_piece_a_box(meta, offset, shape, stride) -> None:
    source = canonical("w", "int8", offset, shape, stride)
    pieces = cut_at_borders(source, [copy_of(source, shape, contiguous_stride(shape))], meta)
    crossed = 3 if shape != (2, 12, 3) or meta is ROWS else 4  # a border is in each half
    assert len(pieces) == crossed
    assert len(set(cells(pieces))) == 3


def test_an_expert_of_a_stack_is_read_from_the_owners_of_its_rows() -> None:
    meta = ParamMeta("w", "int8", (4, 6, 5), (0, 1), (2,), ("shard(1)",))
    source = canonical("w", "int8", 60, (6, 5), (5, 1))
    pieces = cut_at_borders(source, [copy_of(source, (6, 5), (5, 1))], meta)
    assert [(cell, s.offset, s.shape) for cell, (s, _) in pieces] == [
        ((0, 0, 0), 30, (15,)),
        ((0, 1, 0), 30, (15,)),
    ]


def test_placements_that_reorder_or_repeat_share_the_pieces() -> None:
    source = whole(COLUMNS)
    copies = [
        copy_of(source, (12, 6), (6, 1)),
        Placement(source, "m", "turned", 0, (6, 12), (12, 1), "int8", (1, 6)),
        Placement(source, "m", "twice", 0, (2, 12, 6), (72, 6, 1), "int8", (0, 6, 1)),
    ]
    pieces = cut_at_borders(source, copies, COLUMNS)
    assert cells(pieces) == [(0, 0), (0, 1), (0, 2)]
    _, (piece, parts) = pieces[1]
    assert piece == Slice("w", "int8", 0, (24,), (1,))
    assert [(p.offset, p.shape, p.source_stride) for p in parts] == [
        (2, (12, 2), (2, 1)),
        (24, (2, 12), (1, 2)),
        (2, (2, 12, 2), (0, 2, 1)),
    ]


def test_a_box_that_no_placement_reads_is_not_pulled() -> None:
    source = whole(ROWS)
    first_row = Placement(source, "m", "p", 0, (6,), (1,), "int8", (1,))
    assert cells(cut_at_borders(source, [first_row], ROWS)) == [(0, 0)]


def test_a_view_whose_elements_a_border_cuts_is_refused_by_name() -> None:
    meta = ParamMeta("w", "int8", (4, 6), (0, 1), (2,), ("shard(1)",))
    source = canonical("w", "int16", 0, (4, 3), (3, 1))
    with pytest.raises(SliceError, match=r"'w': expected pieces of whole int16 .* at \(0, 3, 6\)"):
        cut_at_borders(source, [copy_of(source, (4, 3), (3, 1))], meta)
    wide = ParamMeta("w", "int8", (4, 8), (0, 1), (2,), ("shard(1)",))
    source = canonical("w", "int16", 0, (4, 4), (4, 1))
    pieces = cut_at_borders(source, [copy_of(source, (4, 4), (4, 1))], wide)
    assert [s.numel for _, (s, _) in pieces] == [8, 8]


def test_a_name_held_whole_has_no_borders() -> None:
    meta = ParamMeta("w", "int8", (4,))
    with pytest.raises(OwnershipError, match="'w' is held whole"):
        cut_at_borders(whole(meta), [], meta)
