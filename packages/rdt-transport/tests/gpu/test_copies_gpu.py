"""Copy tables on a GPU: the compiled kernels, byte for byte, and who may touch what meanwhile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_plan import ServeChunk, Slice, SliceError
from rdt_transport.copies import Copy, CopyTable
from rdt_transport.copy_tiles import Tiling
from rdt_transport.pack import PackList
from rdt_transport.testing.drawn_copies import DrawnCopies, copied, drawn_copies, random_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TILINGS = st.sampled_from((Tiling(), Tiling(512, 1, 1)))


def moved(bases: list[torch.Tensor]) -> list[torch.Tensor]:
    """The bases on the GPU, each as far from an aligned address as it is here."""
    found = []
    for base in bases:
        misfit = base.data_ptr() % 16
        room = torch.empty(len(base) + misfit, dtype=torch.uint8, device="cuda")
        found.append(room[misfit:].copy_(base))
    return found


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "views"])
@given(drawn=drawn_copies(), tiling=TILINGS)
@settings(max_examples=100)
def test_what_was_asked_for_is_copied_and_nothing_else(
    kernels: bool, drawn: DrawnCopies, tiling: Tiling
) -> None:
    sources, targets = moved(drawn.sources), moved(drawn.targets)
    CopyTable(drawn.copies, "cuda", kernels=kernels, tiling=tiling).run(sources, targets)
    for target, wanted in zip(targets, copied(drawn), strict=True):
        assert torch.equal(target.cpu(), wanted)


@pytest.mark.parametrize(
    "tiling", [Tiling(512, 1, 1), Tiling(4096, 2, 1), Tiling(512, 1, 4), Tiling()], ids=str
)
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_rows_of_any_length_in_units_of_any_width(width: int, tiling: Tiling) -> None:
    """With one unit a thread ptxas once moved only the first of 32, or wrote before the target."""
    room, copies = 1 << 14, []
    for n, columns in enumerate((1, 2, 3, 24, 31, 32, 33, 64, 97, 128, 129, 180)):
        steps = (columns + 1, 1), (columns + 2, 1)
        copies.append(Copy(0, 0, n * room, n * room, (5, columns), *steps, width))
    drawn = DrawnCopies(
        copies, [random_bytes(12 * room, 1)], [random_bytes(12 * room + width, 2)[width % 16 :]]
    )
    sources, targets = moved(drawn.sources), moved(drawn.targets)
    CopyTable(copies, "cuda", kernels=True, tiling=tiling).run(sources, targets)
    assert torch.equal(targets[0].cpu(), copied(drawn)[0])


@pytest.mark.parametrize("copy", [
    Copy(0, 0, 0, 0, (2048, 192), (1536, 1), (192, 1), 2),
    Copy(0, 0, 0, 0, (1 << 20,), (1,), (1,), 2),
    Copy(0, 0, 0, 0, (1000, 1100), (1, 1000), (1100, 1), 2),
    Copy(0, 0, 0, 0, (3, 500, 600), (300000, 1, 500), (300000, 600, 1), 1),
    Copy(0, 0, 2, 4, (300, 77), (77, 1), (80, 1), 2),
], ids=["columns", "run", "transposed", "batch", "misfit"])  # fmt: skip
def test_many_tiles(copy: Copy) -> None:
    drawn = DrawnCopies([copy], [random_bytes(8 << 20, 1)], [random_bytes(8 << 20, 2)])
    sources, targets = moved(drawn.sources), moved(drawn.targets)
    CopyTable([copy], "cuda").run(sources, targets)
    assert torch.equal(targets[0].cpu(), copied(drawn)[0])


def test_what_is_prepared_compiles_nothing_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of every width, of runs and of boxes."""
    from triton.runtime.jit import JITFunction

    from rdt_transport.triton_copies import _copy_boxes, _copy_runs

    def forget() -> None:
        for kernel in (_copy_boxes, _copy_runs):
            kernel.device_caches.clear()

    tables = [
        CopyTable([Copy(0, 0, 0, 0, (96, 80), strides, (80, 1), width)], "cuda")
        for strides in ((80, 1), (1, 96), (160, 2))
        for width in (1, 2, 4, 8, 16)
    ]
    forget()
    for table in tables:
        table.prepare()
    monkeypatch.setattr(JITFunction, "_do_compile", None)
    source = random_bytes(96 * 160 * 16, 1).cuda()
    for table in tables:
        target = torch.zeros(table.num_bytes, dtype=torch.uint8, device="cuda")
        table.run([source], [target])
        assert bool(target.any())
    forget()
    with pytest.raises(TypeError):  # it has to be compiled now, and cannot be
        tables[0].run([source], [torch.zeros(tables[0].num_bytes, dtype=torch.uint8).cuda()])


def test_bases_of_another_alignment_than_the_last_ones() -> None:
    copy = Copy(0, 0, 0, 0, (4096,), (1,), (1,), 1)
    table = CopyTable([copy], "cuda")
    room = random_bytes(8192, 1).cuda()
    for read, write in ((0, 0), (1, 0), (0, 2), (4, 4), (8, 0), (16, 32)):
        target = torch.zeros(8192, dtype=torch.uint8, device="cuda")
        table.run([room[read:]], [target[write:]])
        assert torch.equal(target[write : write + 4096], room[read : read + 4096])
        assert int(target.count_nonzero()) == int(room[read : read + 4096].count_nonzero())


def test_the_addresses_of_many_runs_in_flight_are_kept_apart() -> None:
    """Every run has bases of its own, all of them waiting behind slow work."""
    copy = Copy(0, 0, 0, 0, (1024,), (1,), (1,), 4)
    table = CopyTable([copy], "cuda")
    sources = [torch.full((1024,), n, dtype=torch.int32, device="cuda") for n in range(64)]
    targets = [torch.zeros(1024, dtype=torch.int32, device="cuda") for _ in range(64)]
    table.run(sources[:1], targets[:1])
    torch.cuda._sleep(50_000_000)
    for source, target in zip(sources, targets, strict=True):
        table.run([source], [target])
    for n, target in enumerate(targets):
        assert target.tolist() == [n] * 1024


def test_a_table_runs_on_any_stream_in_the_order_of_that_stream() -> None:
    """Streams take turns, each with bases of its own and slow work before; nobody waits."""
    copy = Copy(0, 0, 0, 0, (1 << 20,), (1,), (1,), 1)
    streams = [torch.cuda.Stream() for _ in range(3)]
    sources = torch.zeros(12, 1 << 20, dtype=torch.uint8, device="cuda")
    targets = torch.zeros_like(sources)
    torch.cuda.synchronize()
    table = CopyTable([copy], "cuda")
    for n in range(12):
        with torch.cuda.stream(streams[n % 3]):
            torch.cuda._sleep(5_000_000)
            sources[n].fill_(n)
            table.run([sources[n]], [targets[n]])
    torch.cuda.synchronize()
    for n in range(12):
        assert bool((targets[n] == n).all())


def test_a_table_of_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    copy = Copy(0, 0, 0, 0, (4096,), (1,), (1,), 1)
    source = random_bytes(4096, 1).to("cuda:1")
    target = torch.zeros_like(source)
    with torch.cuda.device(0):
        CopyTable([copy], "cuda:1").run([source], [target])
    assert torch.equal(source, target)


def test_a_base_on_the_host_is_refused() -> None:
    table = CopyTable([Copy(0, 0, 0, 0, (8,), (1,), (1,), 1)], "cuda", source_names=["w"])
    host = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(SliceError, match=r"^w: .* 8 bytes on cuda:0, found 8 on cpu"):
        table.run([host], [host.cuda()])


def test_a_chunk_is_packed() -> None:
    rows = Slice("a", "bfloat16", 5, (40, 30), (60, 1))
    turned = Slice("b", "float32", 0, (50, 40), (1, 50))
    sources = {
        "a": torch.randn(4800, device="cuda").bfloat16(),
        "b": torch.randn(2000, device="cuda"),
    }
    packed = torch.zeros(10400, dtype=torch.uint8, device="cuda")
    PackList(ServeChunk(0, 0, 0, 10400, (rows, turned), (0, 2400)), packed).run(sources)
    wanted = sources["a"][5:2405].view(40, 60)[:, :30]
    assert torch.equal(packed[:2400].view(torch.bfloat16).view(40, 30), wanted)
    assert torch.equal(
        packed[2400:].view(torch.float32).view(50, 40), sources["b"].view(40, 50).t()
    )
