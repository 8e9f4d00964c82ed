from math import prod

from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import ParamMeta, Placement, Slice, canonical, contiguous_stride, cut, whole
from rdt_plan.slices import check_bounds, last_element
from rdt_plan.testing import pack_slice, param_metas, place, placements, slices


def written(pieces, source: bytes) -> list[bytes]:
    """The destination bytes of each placement, after all pieces ran."""
    destinations: list[bytearray] = []
    for slice_, copies in pieces:
        packed = pack_slice(slice_, source)
        for number, placement in enumerate(copies):
            if number == len(destinations):
                destinations.append(bytearray())
            assert placement.slice == slice_
            last = last_element(placement.offset, placement.shape, placement.stride)
            need = 0 if 0 in placement.shape else (last + 1) * (len(packed) // slice_.numel)
            destinations[number].extend(b"\xff" * (need - len(destinations[number])))
            place(placement, packed, destinations[number])
    return [bytes(destination) for destination in destinations]


@given(st.data())
def test_pieces_write_what_the_uncut_slice_writes(data: st.DataObject) -> None:
    meta = data.draw(param_metas(max_dims=4))
    slice_ = data.draw(slices(meta))
    copies = tuple(data.draw(st.lists(placements(slice_), max_size=3)))
    max_bytes = data.draw(st.integers(1, 64))
    source = bytes(i % 251 for i in range(meta.num_bytes))

    pieces = cut(slice_, copies, max_bytes)

    assert b"".join(pack_slice(s, source) for s, _ in pieces) == pack_slice(slice_, source)
    assert written(pieces, source) == written([(slice_, copies)], source)
    for piece, _ in pieces:
        check_bounds(piece, meta)  # canonical, too


@given(st.data())
def test_pieces_fit_when_all_dims_split_or_merge_those_of_the_slice(data: st.DataObject) -> None:
    meta = data.draw(param_metas(max_dims=4))
    slice_ = data.draw(slices(meta))
    copy = data.draw(placements(slice_, aligned=True, broadcast=False))
    item = slice_.num_bytes // max(slice_.numel, 1)
    max_bytes = data.draw(st.integers(1, 64))
    for piece, (piece_copy,) in cut(slice_, [copy], max_bytes):
        assert piece.num_bytes <= max(max_bytes, item)
        assert prod(piece_copy.shape) == piece.numel


def test_rows_first_then_the_rows_of_a_row() -> None:
    meta = ParamMeta("w", "bfloat16", (4, 6))
    rows = cut(whole(meta), [copy_of(whole(meta), (4, 6), (10, 1))], max_bytes=24)
    assert [(s.offset, s.shape) for s, _ in rows] == [(0, (12,)), (12, (12,))]
    assert [(p.offset, p.shape, p.stride) for _, (p,) in rows] == [
        (0, (2, 6), (10, 1)),
        (20, (2, 6), (10, 1)),
    ]
    halves = cut(whole(meta), [copy_of(whole(meta), (4, 6), (10, 1))], max_bytes=8)
    assert [s.shape for s, _ in halves] == [(4,), (2,)] * 4
    assert [p.offset for _, (p,) in halves] == [0, 4, 10, 14, 20, 24, 30, 34]


def test_a_transposed_destination_is_cut_with_its_source() -> None:
    source = canonical("w", "int8", 0, (3, 4), (1, 3))
    copy = copy_of(source, (3, 4), (1, 3))
    pieces = cut(source, [copy], max_bytes=4)
    assert [(s.offset, s.stride) for s, _ in pieces] == [(0, (3,)), (1, (3,)), (2, (3,))]
    assert [(p.offset, p.stride) for _, (p,) in pieces] == [(0, (3,)), (1, (3,)), (2, (3,))]


def test_destinations_of_different_dims_are_cut_where_both_begin_a_row() -> None:
    source = whole(ParamMeta("w", "int8", (24,)))
    copies = [copy_of(source, (4, 6), (7, 1)), copy_of(source, (6, 4), (5, 1))]
    pieces = cut(source, copies, max_bytes=13)
    assert [s.shape for s, _ in pieces] == [(12,), (12,)]
    assert [[p.shape for p in copies] for _, copies in pieces] == [[(2, 6), (3, 4)]] * 2
    assert cut(source, copies, max_bytes=11)[0][0].numel == 12  # no finer common boundary


def test_repeating_and_reordering_placements_are_not_cut() -> None:
    source = whole(ParamMeta("w", "int8", (4, 6)))
    copy = copy_of(source, (4, 6), (6, 1))
    repeated = copy._replace(shape=(2, 4, 6), stride=(24, 6, 1), source_stride=(0, 6, 1))
    reordered = copy._replace(shape=(6, 4), stride=(4, 1), source_stride=(1, 6))
    partial = copy._replace(shape=(2, 6), stride=(6, 1), source_stride=(6, 1))
    for other in (repeated, reordered, partial):
        assert cut(source, [copy, other], max_bytes=1) == [(source, (copy, other))]


def test_a_cast_counts_source_bytes_and_single_elements_may_exceed_the_cap() -> None:
    source = whole(ParamMeta("w", "bfloat16", (4,)))
    copy = copy_of(source, (4,), (1,))._replace(dtype="float32")
    assert [s.numel for s, _ in cut(source, [copy], max_bytes=4)] == [2, 2]
    assert [s.shape for s, _ in cut(source, [copy], max_bytes=1)] == [(), (), (), ()]


def copy_of(source: Slice, shape: tuple[int, ...], stride: tuple[int, ...]) -> Placement:
    return Placement(source, "m", "p", 0, shape, stride, source.dtype, contiguous_stride(shape))
