import torch

from rdt_plan import ConsumerId, Manifest, ParamMeta, Placement, build_plan, whole
from rdt_transport.receive_ring import ReceiveRing

MANIFEST = Manifest.build([ParamMeta(f"l.{i}.w", "int8", (n,)) for i, n in enumerate((40, 3, 20))])


def writes():
    for param in MANIFEST.params:
        size = param.shape
        yield Placement(whole(param), "m", param.name, 0, size, (1,), "int8", (1,))


def test_each_chunk_lands_whole_in_its_own_slot():
    plan = build_plan(MANIFEST, list(writes()), ConsumerId(0, 0), num_workers=1, num_slots=2)
    ring = ReceiveRing(plan, "cpu")
    assert [chunk.receive_slot for chunk in plan.chunks] == [0, 1, 0]
    for value, chunk in enumerate(plan.chunks[1:]):
        ring.packed(chunk).fill_(value + 1)

    for value, chunk in enumerate(plan.chunks[1:]):
        packed, region = ring.packed(chunk), ring.region(chunk)
        assert torch.equal(packed, torch.full((chunk.serve.num_bytes,), value + 1).to(torch.uint8))
        assert (region.address, region.num_bytes) == (packed.data_ptr(), packed.numel())
        assert packed.untyped_storage().data_ptr() == ring.buffer.untyped_storage().data_ptr()


def test_a_plan_without_chunks_has_a_ring_too():
    plan = build_plan(MANIFEST, [], ConsumerId(0, 0), num_workers=1)

    assert ReceiveRing(plan, "cpu").buffer.numel() > 0
