"""Copy tables, byte for byte: the plain path, and the kernels in Triton's interpreter."""

import doctest
import importlib.util
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_plan import Chunk, Placement, ServeChunk, Slice, SliceError
from rdt_transport import copy_blocks
from rdt_transport.chunk_copies import pack_copies, scatter_copies
from rdt_transport.copies import Copy, CopyTable
from rdt_transport.copy_blocks import blocks_of
from rdt_transport.copy_tiles import Kind, Tiling, tile_tables
from rdt_transport.testing.drawn_copies import DrawnCopies, copied, drawn_copies, random_bytes

# On a GPU kernels are compiled: see gpu/test_copies_gpu.py.
INTERPRETS = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
if INTERPRETS:
    import triton

    with triton.knobs.runtime.scope():  # for these kernels only
        triton.knobs.runtime.interpret = True
        importlib.import_module("rdt_transport.triton_copies")

needs_triton = pytest.mark.skipif(not INTERPRETS, reason="no Triton to interpret")


@pytest.fixture(params=["views", pytest.param("kernels", marks=needs_triton)])
def kernels(request: pytest.FixtureRequest) -> bool:
    return request.param == "kernels"


TILINGS = st.builds(Tiling, st.sampled_from((64, 512, 4096)), st.just(1), st.sampled_from((1, 2)))


def check(drawn: DrawnCopies, table: CopyTable) -> None:
    expected = copied(drawn)
    table.run(drawn.sources, drawn.targets)
    for target, wanted in zip(drawn.targets, expected, strict=True):
        assert torch.equal(target, wanted)


@given(drawn=drawn_copies())
@settings(max_examples=150)
def test_views_copy_what_was_asked_for_and_nothing_else(drawn: DrawnCopies) -> None:
    check(drawn, CopyTable(drawn.copies, "cpu", kernels=False))


@needs_triton
@given(drawn=drawn_copies(), tiling=TILINGS, is_prepared=st.booleans())
@settings(max_examples=60)
def test_kernels_copy_what_was_asked_for_and_nothing_else(
    drawn: DrawnCopies, tiling: Tiling, is_prepared: bool
) -> None:
    table = CopyTable(drawn.copies, "cpu", kernels=True, tiling=tiling)
    if is_prepared:
        table.prepare()
    check(drawn, table)


CASES = {
    "one run": Copy(0, 0, 0, 0, (3000,), (1,), (1,), 2),
    "a column slice": Copy(0, 0, 192, 0, (40, 96), (768, 1), (96, 1), 2),
    "a row slice of experts": Copy(0, 0, 0, 0, (6, 9, 32), (700, 32, 1), (288, 32, 1), 2),
    "transposed": Copy(0, 0, 0, 0, (70, 90), (1, 70), (90, 1), 2),
    "transposed, in a batch": Copy(0, 0, 0, 0, (3, 70, 33), (2310, 1, 70), (2310, 33, 1), 4),
    "every other element": Copy(0, 0, 0, 0, (500,), (2,), (1,), 4),
    "of no whole unit": Copy(0, 0, 3, 3, (999,), (1,), (1,), 1),
    "five axes": Copy(0, 0, 0, 0, (2, 3, 2, 3, 8), (1, 99, 2, 400, 10), (150, 50, 20, 300, 2), 1),
    "six axes": Copy(0, 0, 0, 0, (2,) * 6, (1, 3, 7, 15, 31, 63), (63, 1, 31, 3, 15, 7), 1),
    "one element": Copy(0, 0, 16, 32, (), (), (), 16),
    "no element": Copy(0, 0, 0, 0, (0, 5), (5, 1), (5, 1), 4),
}


@pytest.mark.parametrize("misfit", [0, 1, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_copies_of_models(kernels: bool, name: str, misfit: int) -> None:
    sources = [random_bytes(80000, 1)[misfit:]]
    targets = [random_bytes(80000, 2)[misfit:]]
    table = CopyTable([CASES[name]], "cpu", kernels=kernels, tiling=Tiling(1024, 1, 2))
    check(DrawnCopies([CASES[name]], sources, targets), table)


def test_new_bases_are_read_and_written_whatever_their_alignment(kernels: bool) -> None:
    copy = CASES["a column slice"]
    table = CopyTable([copy], "cpu", kernels=kernels)
    for seed, (read, write) in enumerate([(0, 0), (0, 0), (2, 0), (0, 1), (16, 32)]):
        sources = [random_bytes(80000, seed)[read:]]
        targets = [random_bytes(80000, seed + 50)[write:]]
        check(DrawnCopies([copy], sources, targets), table)
        sources[0].copy_(random_bytes(len(sources[0]), seed + 99))
        check(DrawnCopies([copy], sources, targets), table)


def test_any_dtype_is_only_bits(kernels: bool) -> None:
    bits = random_bytes(4096, 3)
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.complex128):
        source, target = bits.view(dtype), torch.zeros(4096, dtype=torch.uint8).view(dtype)
        item = dtype.itemsize
        copy = Copy(0, 0, 0, 0, (4096 // item,), (1,), (1,), item)
        CopyTable([copy], "cpu", kernels=kernels).run([source], [target])
        assert torch.equal(target.view(torch.uint8), bits)


def test_a_base_counts_from_its_first_element(kernels: bool) -> None:
    whole = torch.arange(64, dtype=torch.float32).view(8, 8)
    target = torch.zeros(8, 8)
    copy = Copy(0, 0, 0, 0, (3, 2), (8, 1), (8, 1), 4)
    CopyTable([copy], "cpu", kernels=kernels).run([whole[2:, 4:]], [target.t()[1:].t()])
    assert torch.equal(target[:3, 1:3], whole[2:5, 4:6])
    assert target.count_nonzero() == 6


def test_a_storage_may_start_anywhere(kernels: bool) -> None:
    memory = bytearray(range(256)) * 2
    offset = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 16 + 8
    source = torch.frombuffer(memory, dtype=torch.uint8, offset=offset)[8:]
    assert source.data_ptr() % 16 == 0
    target = torch.zeros(256, dtype=torch.uint8)
    CopyTable([Copy(0, 0, 0, 0, (256,), (1,), (1,), 1)], "cpu", kernels=kernels).run(
        [source], [target]
    )
    assert torch.equal(target, source[:256])


def test_bases_that_do_not_hold_the_copy_are_refused(kernels: bool) -> None:
    copy = Copy(0, 1, 0, 8, (4,), (2,), (1,), 4)
    table = CopyTable(
        [copy], "cpu", kernels=kernels, source_names=["w"], target_names=["spare", "p"]
    )
    good, small = torch.zeros(24, dtype=torch.uint8), torch.zeros(23, dtype=torch.uint8)
    wide = torch.zeros(28, dtype=torch.uint8)
    with pytest.raises(SliceError, match=r"^w: expected at least 28 bytes on cpu, found 24"):
        table.run([good], [good, good])
    with pytest.raises(SliceError, match=r"^p: expected at least 24 bytes on cpu, found 23"):
        table.run([wide], [small, small])
    with pytest.raises(SliceError, match=r"^p: .* found 24 on meta"):
        table.run([wide], [good, good.to("meta")])
    with pytest.raises(SliceError, match="expected 1 sources and 2 targets, found 1 and 1"):
        table.run([wide], [good])
    table.run([wide], [small, good])


def test_a_base_whose_memory_was_taken_away_is_refused(kernels: bool) -> None:
    """As FSDP does with what it has gathered: shape, strides and dtype are what they were."""
    table = CopyTable([Copy(0, 0, 0, 0, (6,), (1,), (1,), 4)], "cpu", kernels=kernels)
    whole, emptied = torch.zeros(6), torch.zeros(6)
    table.run([emptied], [whole])
    emptied.untyped_storage().resize_(0)
    with pytest.raises(SliceError, match=r"^source 0: expected at least 24 bytes on cpu, found 0"):
        table.run([emptied], [whole])
    with pytest.raises(SliceError, match=r"^target 0: expected at least 24 bytes on cpu, found 0"):
        table.run([whole], [emptied])


@needs_triton
def test_addresses_that_could_not_be_sent_are_sent_the_next_time() -> None:
    """Kernels would read and write where what was sent before lay."""
    from rdt_transport.triton_copies import _Addresses

    addresses = _Addresses(torch.device("cuda", 0))  # there is none
    for _ in range(2):
        with pytest.raises(RuntimeError):
            addresses.uploaded([4096, 8192])


@pytest.mark.parametrize(
    "change",
    [
        {"item_bytes": 3},
        {"source_strides": (1,)},
        {"source_offset": -1},
        {"target_strides": (0, 1)},
        {"shape": (-2, 3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_copy_that_contradicts_itself_is_refused(change: dict) -> None:
    copy = Copy(0, 0, 0, 0, (2, 3), (3, 1), (3, 1), 4)._replace(**change)
    with pytest.raises(SliceError, match=r"expected .*, found Copy"):
        CopyTable([copy], "cpu")


def test_the_examples_hold() -> None:
    assert doctest.testmod(copy_blocks) == (0, 2)


def test_a_long_run_keeps_a_wide_middle_where_both_sides_are_equally_misaligned() -> None:
    copy = Copy(0, 0, 5, 21, (1000,), (1,), (1,), 1)
    found = [(each.source_offset, each.run_bytes, each.width) for each in blocks_of(copy, 0, 0)]
    assert found == [(5, 11, 1), (16, 976, 16), (992, 13, 1)]
    assert [each.width for each in blocks_of(copy, 0, 1)] == [1]
    assert [each.width for each in blocks_of(copy, 3, 3)] == [8, 16]


def test_a_kind_of_work_is_one_launch_of_tiles_of_about_equal_bytes() -> None:
    """A rank's slices of one layer: rows and columns of each of 128 experts, and norms."""
    copies = [Copy(0, 0, 0, 0, (4096,), (1,), (1,), 2)]
    for expert in range(128):
        at = expert * 1536 * 4096 * 2
        copies.append(Copy(1, 1, at, at // 8, (192, 4096), (4096, 1), (4096, 1), 2))
        copies.append(Copy(2, 2, at, at // 8, (4096, 192), (1536, 1), (192, 1), 2))
    blocks = [block for copy in copies for block in blocks_of(copy, 0, 0)]
    (table,) = tile_tables(blocks, Tiling(32 << 10))
    assert table.kind == Kind(width=16, is_transposed=False, is_batched=False)
    num_tiles = len(table.block_of_tile)
    assert num_tiles == 1 + 128 * (48 + 49)  # 85 rows of 384 bytes fit into 32 KiB


@needs_triton
@pytest.mark.parametrize("columns", [1, 3, 41, 47, 255, 4095, 21845, 32767, 65535, 65536])
def test_units_of_the_largest_tiles_are_told_apart(columns: int) -> None:
    """Rows of bytes, as many as a tile of 64 KiB holds; each tile is divided by its columns."""
    rows = (1 << 16) // columns
    copy = Copy(0, 0, 0, 0, (rows, columns), (columns + 1, 1), (columns + 2, 1), 1)
    drawn = DrawnCopies([copy], [random_bytes(1 << 18, 1)], [random_bytes(1 << 18, 2)[1:]])
    check(drawn, CopyTable([copy], "cpu", kernels=True, tiling=Tiling(1 << 16, 32, 4)))


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rdt_transport.triton_copies import _copy_runs

constants = {"FIELDS": 23, "LANES": 2, "WIDTH": 16, "IS_BATCHED": False, "STEP": 512}
signature = {"addresses": "*i64", "blocks": "*i64", "block_of_tile": "*i32"}
signature |= dict.fromkeys(constants, "constexpr")
source = ASTSource(_copy_runs, signature, constants)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
print(compiled.asm["ptx"])
"""


@needs_triton
def test_a_thread_moves_16_bytes_at_once() -> None:
    """Compiled for a GPU, without one: four loads under way, and the same stores."""
    run = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for access in ("ld.global.v2.b64", "st.global.v2.b64"):
        assert run.stdout.count(access) == 4
    # No upper half of a product: ptxas takes one, times another number, for that of all three.
    assert "mul.hi" not in run.stdout
    assert "mov.b64 \t{_" not in run.stdout


# ---- packing and scattering ----------------------------------------------------------------------


def test_packing_and_scattering_are_inverse(kernels: bool) -> None:
    rows = Slice("a", "bfloat16", 6, (4, 3), (6, 1))
    turned = Slice("b", "float32", 0, (5, 4), (1, 5))
    lone = Slice("a", "float16", 3, (), ())
    serve = ServeChunk(0, 0, 0, 114, (rows, turned, lone), (0, 32, 112))
    sources = {"b": torch.randn(20), "a": torch.randn(40).bfloat16()}
    packed = torch.zeros(114, dtype=torch.uint8)
    names = ["b", "a"]
    CopyTable(pack_copies(serve, names), "cpu", kernels=kernels).run(
        [sources[name] for name in names], [packed]
    )
    assert torch.equal(
        packed[:24].view(torch.bfloat16), sources["a"][6:30].view(4, 6)[:, :3].flatten()
    )
    assert torch.equal(packed[32:112].view(torch.float32).view(5, 4), sources["b"].view(4, 5).t())
    assert torch.equal(packed[112:].view(torch.int16), sources["a"].view(torch.int16)[3:4])

    placements = (
        Placement(rows, "m", "w", 1, (3, 4), (4, 1), "bfloat16", (1, 3)),
        Placement(lone, "m", "w", 0, (), (), "float16", ()),
        Placement(turned, "n", "w", 0, (20,), (1,), "float32", (1,)),
        Placement(turned, "n", "cast", 0, (20,), (1,), "bfloat16", (1,)),
        Placement(lone, "n", "repeated", 0, (2,), (1,), "float16", (0,)),
        Placement(turned, "n", "%0", 0, (20,), (1,), "float32", (1,)),
    )
    scatter = scatter_copies(Chunk(0, 0, serve, 0, placements, (), ()))
    assert scatter.targets == (("m", "w"), ("n", "w"))
    assert scatter.others == placements[3:]
    first, second = torch.zeros(16, dtype=torch.bfloat16), torch.zeros(20)
    CopyTable(scatter.copies, "cpu", kernels=kernels).run([packed], [first, second])
    assert torch.equal(first[1:13].view(3, 4), sources["a"][6:30].view(4, 6)[:, :3].t())
    assert torch.equal(first[:1].view(torch.int16), sources["a"].view(torch.int16)[3:4])
    assert first[13:].count_nonzero() == 0
    assert torch.equal(second.view(5, 4), sources["b"].view(4, 5).t())


def test_a_slice_without_a_source_is_refused() -> None:
    chunk = ServeChunk(0, 0, 0, 4, (Slice("a", "float32", 0, (), ()),), (0,))
    with pytest.raises(SliceError, match=r"^a: "):
        pack_copies(chunk, ["b"])
