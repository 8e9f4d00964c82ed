import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_plan import ConsumerId, Manifest, ParamMeta, Placement, build_plan, canonical
from rdt_transport.checksums import (
    CHECKSUM_CHARS,
    chunk_checksums,
    region_checksum,
    split_checksums,
    sync_key,
)
from rdt_transport.pack import PackList

KEY = b"k" * 32
DTYPES = ("bool", "uint8", "bfloat16", "float32", "int64", "complex128")


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return found.view(dtype).view(shape)


def test_every_byte_the_order_and_the_key_count():
    tensor = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    found = region_checksum(tensor, KEY)
    assert len(found) == CHECKSUM_CHARS
    assert region_checksum(tensor.clone(), KEY) == found
    assert region_checksum(tensor, b"l" * 32) != found
    assert region_checksum(tensor.transpose(0, 1), KEY) != found
    assert region_checksum(tensor.transpose(0, 1).contiguous().transpose(0, 1), KEY) == found
    for at in range(24):
        changed = tensor.clone()
        changed.view(-1)[at] ^= 0x80
        assert region_checksum(changed, KEY) != found


def test_bits_count_and_not_values():
    values = torch.tensor([0.0, -0.0, float("nan")])
    assert region_checksum(values[:1], KEY) != region_checksum(values[1:2], KEY)
    assert region_checksum(values, KEY) == region_checksum(values.clone(), KEY)
    odd = torch.tensor([2, 1], dtype=torch.uint8).view(torch.bool)  # a copy would make it 1
    assert region_checksum(odd, KEY) == region_checksum(odd.view(torch.uint8), KEY)
    assert region_checksum(odd[:1], KEY) != region_checksum(odd[1:], KEY)
    assert region_checksum(torch.tensor(3.5), KEY) == region_checksum(torch.tensor([3.5]), KEY)


def test_keys_are_fresh():
    assert len({sync_key() for _ in range(100)}) == 100
    assert all(len(bytes.fromhex(sync_key())) == 32 for _ in range(10))


@settings(max_examples=40)
@given(st.data())
def test_they_are_those_of_the_packed_bytes(data):
    """Of whatever slices a plan has: strided, of several tensors, and of another dtype."""
    params, writes, sources = [], [], {}
    for index in range(data.draw(st.integers(1, 3))):
        dtype = data.draw(st.sampled_from(DTYPES))
        shape = tuple(data.draw(st.lists(st.integers(2, 5), min_size=2, max_size=3)))
        name = f"layers.0.w{index}"
        params.append(ParamMeta(name, dtype, shape))
        sources[name] = drawn(shape, getattr(torch, dtype), index)
        viewed, extent = sources[name], shape[-1]
        if data.draw(st.booleans()):  # as bytes
            viewed = viewed.view(torch.uint8)
            extent = viewed.shape[-1]
        start = data.draw(st.integers(0, extent - 1))
        region = viewed.narrow(-1, start, data.draw(st.integers(1, extent - start)))
        if data.draw(st.booleans()):
            region = region.transpose(0, 1)
        kind = str(region.dtype).removeprefix("torch.")
        slice_ = canonical(
            name, kind, int(region.storage_offset()), tuple(region.shape), region.stride()
        )
        stride = torch.empty(slice_.shape, device="meta").stride()
        writes.append(Placement(slice_, "m", f"p{index}", 0, slice_.shape, stride, kind, stride))
    plan = build_plan(
        Manifest.build(params), writes, ConsumerId(0, 0), num_workers=1, max_chunk_bytes=64
    )
    table = plan.table(0)
    found = list(chunk_checksums(table, KEY, sources.__getitem__))
    assert len(found) == len(table.chunks)
    for chunk, text in zip(table.chunks, found, strict=True):
        packed = torch.zeros(chunk.num_bytes, dtype=torch.uint8)
        PackList(chunk, packed).run(sources)
        starts = zip(chunk.slices, chunk.offsets, strict=True)
        parts = [packed[start : start + each.num_bytes] for each, start in starts]
        assert split_checksums(text) == [region_checksum(part, KEY) for part in parts]
