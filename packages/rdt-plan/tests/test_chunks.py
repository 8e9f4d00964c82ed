from collections.abc import Iterable

from hypothesis import assume, given
from hypothesis import strategies as st

from rdt_plan import Placement, Slice, contiguous_stride, cut, pack_layout
from rdt_plan.chunks import ServeChunk, chunked
from rdt_plan.cutting import Piece
from rdt_plan.testing import manifests, writes


def copy(name: str, numel: int, module: str = "m", offset: int = 0, cols: int = 1) -> Placement:
    slice_ = Slice(name, "int8", offset, (numel,), (1,))
    shape = (numel // cols, cols)
    return Placement(slice_, module, name, 0, shape, shape[::-1], "int8", contiguous_stride(shape))


def by_slice(copies: Iterable[Placement]) -> list[Piece]:
    stream: dict[Slice, tuple[Placement, ...]] = {}
    for placement in copies:
        stream[placement.slice] = (*stream.get(placement.slice, ()), placement)
    return list(stream.items())


def names(chunks) -> list[list[tuple[str, int]]]:
    return [[(slice_.name, slice_.numel) for slice_ in chunk.slices] for chunk in chunks]


def test_chunks_are_filled_in_first_use_order_with_the_packed_layout() -> None:
    copies = [copy("a", 20), copy("b", 30), copy("c", 1), copy("d", 64), copy("e", 1)]
    assert names(chunked(by_slice(copies), 64)) == [
        [("a", 20), ("b", 30)],  # ends at 62; c would start at 64
        [("c", 1)],
        [("d", 64)],
        [("e", 1)],
    ]


def test_equal_slices_are_packed_once() -> None:
    copies = [copy("a", 8, "m1"), copy("b", 8), copy("a", 8, "m2")]
    (chunk,) = chunked(by_slice(copies), 64)
    assert [p.module for p in chunk.placements] == ["m1", "m2", "m"]
    assert [slice_.name for slice_ in chunk.slices] == ["a", "b"]


def test_equal_slices_are_cut_alike_before_they_are_compared() -> None:
    copies = [copy("a", 24, "m1", cols=4), copy("a", 24, "m2", cols=6), copy("a", 12, "m3")]
    chunks = chunked(by_slice(copies), 12)
    assert names(chunks) == [[("a", 12)], [("a", 12)]]
    assert [p.module for p in chunks[0].placements] == ["m1", "m2", "m3"]
    assert [p.module for p in chunks[1].placements] == ["m1", "m2"]


def test_an_uncuttable_piece_exceeds_the_cap_alone() -> None:
    slice_ = Slice("a", "int8", 0, (100,), (1,))
    broadcast = Placement(slice_, "m", "p", 0, (2, 100), (100, 1), "int8", (0, 1))
    chunks = chunked(by_slice([copy("x", 4), broadcast, copy("y", 4)]), 16)
    assert names(chunks) == [[("x", 4)], [("a", 100)], [("y", 4)]]


@given(st.data(), st.integers(1, 200))
def test_chunks_hold_every_copy_once_and_respect_the_cap(data, max_chunk_bytes: int) -> None:
    drawn = data.draw(writes(data.draw(manifests())))
    copies = [w for w in drawn if isinstance(w, Placement) and w.slice.numel]
    assume(copies)
    stream = by_slice(copies)
    chunks = chunked(stream, max_chunk_bytes)
    for slices, copies_of, layout, _ in chunks:
        assert layout == pack_layout(slices)
        assert list(dict.fromkeys(copy.slice for copy in copies_of)) == list(slices)
        assert 0 < layout.num_bytes
        assert layout.num_bytes <= max_chunk_bytes or len(slices) == 1
    pieces = [slice_ for chunk in chunks for slice_ in chunk.slices]
    assert len(set(pieces)) == len(pieces)
    expected = [p for s, c in stream for _, cs in cut(s, c, max_chunk_bytes) for p in cs]
    found = [p for chunk in chunks for p in chunk.placements]
    assert sorted(found, key=repr) == sorted(expected, key=repr)


def test_its_tensors_are_the_first_and_how_many_more() -> None:
    slices = [Slice(name, "int8", 0, (4,), (1,)) for name in "baac"]

    def row(num_slices: int) -> str:
        return ServeChunk(0, 0, 0, 64, tuple(slices[:num_slices]), (0, 16, 32, 48)).tensors

    assert [row(n) for n in range(5)] == ["no tensor", "b", *["b and 1 more"] * 2, "b and 2 more"]
