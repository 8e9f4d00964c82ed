"""What a sync costs in messages: at most two doorbells a chunk, and a constant."""

import pytest

from rdt_transport.rendezvous import JobSettings
from rdt_transport.testing.counted_wire import CountedWire
from rdt_transport.testing.sample_job import draw, in_process, model, open_fleet, stable_tensors
from rdt_transport.wire.base import Wire

A_SYNC = 2  # of a consumer at the rendezvous: its commit, and the answer


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("max_chunk_bytes", [64, 1 << 20])
@pytest.mark.parametrize("num_layers", [1, 6])
def test_messages_of_a_sync(num_layers: int, max_chunk_bytes: int, direct: bool) -> None:
    manifest = model(num_layers, owners=((0, 1), (1,)))
    make, wires = in_process(), dict[str, CountedWire]()

    def make_wire(role: str) -> Wire:
        wires[role] = CountedWire(make(role))
        return wires[role]

    def counts() -> tuple[list[int], list[int], list[int]]:
        told = [client.num_messages for client in fleet.clients[-3:]]
        return told, [w.num_sent for w in wires.values()], [w.num_received for w in wires.values()]

    settings = JobSettings(2, 2, max_chunk_bytes=max_chunk_bytes)
    sources = [stable_tensors(manifest, rank) for rank in range(2)] if direct else None
    with open_fleet(make_wire, manifest, settings, (2, 1), sources=sources) as fleet:
        chunks = [len(consumer.plan.chunks) for consumer in fleet.consumers]
        for epoch in range(3):
            before = counts()
            fleet.sync(draw(manifest, epoch))
            told, sent, received = (
                [b - a for a, b in zip(*each, strict=True)]
                for each in zip(before, counts(), strict=True)
            )
            assert told == [A_SYNC] * 3
            assert sent[-3:] == received[-3:] == chunks  # a DONE and a READY each
            assert sum(sent[:-3]) == sum(received[:-3]) == sum(chunks)
