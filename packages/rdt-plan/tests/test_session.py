"""One producer and one consumer, by hand; `test_simulate` has whole fleets."""

import dataclasses

import pytest

from rdt_plan.chunks import Chunk, ServeChunk
from rdt_plan.identity import ConsumerId
from rdt_plan.session import (
    ConsumerEpoch,
    EpochState,
    Finished,
    Pack,
    PostRead,
    ProducerEpoch,
    Quiesced,
    Ready,
    Release,
    Scatter,
)
from rdt_plan.table import ChunkTable

WHO, RING = ConsumerId(0, 1), "0" * 64


def pair(num_chunks: int, num_slots: int) -> tuple[ProducerEpoch, ConsumerEpoch]:
    rows = tuple(
        ServeChunk(seq, seq // 2, seq % num_slots, 16, (), ()) for seq in range(num_chunks)
    )
    chunks = [Chunk(row.seq, 3, row, row.serve_slot, (), (), ()) for row in rows]
    table = ChunkTable(WHO, 3, RING, num_slots, 16, rows)
    return ProducerEpoch({WHO: table}, [0, 1], 0), ConsumerEpoch(chunks, num_slots)


def test_one_slot_carries_three_chunks_in_lockstep() -> None:
    producer, consumer = pair(3, 1)
    assert consumer.begin() == []
    started = producer.publish(0)
    for seq in range(3):
        assert started == [Pack(RING, seq)]
        assert producer.pack_enqueued(RING, seq) == []
        assert producer.packed(RING, seq) == [Ready(WHO, seq)]
        assert consumer.ready(3, seq) == [PostRead(seq)]
        assert consumer.read_done(seq) == [Scatter(seq)]
        assert consumer.scatter_enqueued(seq) == []
        assert consumer.scatter_completed(seq) == ([Finished()] if seq == 2 else [])
        started = producer.done(WHO, seq)
        if seq == 1:
            assert started == [Release(0)]
            started = producer.publish(1)
    assert started == [Release(1), Finished()]
    assert (producer.state, consumer.state) == (EpochState.FINISHED, EpochState.FINISHED)


@pytest.mark.parametrize(
    "action",
    [
        Finished(),
        Quiesced("why"),
        PostRead(0),
        Scatter(0),
        Pack(RING, 0),
        Ready(WHO, 0),
        Release(0),
    ],
)
def test_actions_are_frozen_values(action: object) -> None:
    assert dataclasses.is_dataclass(action)
    assert hash(action) == hash(dataclasses.replace(action))
    for field in dataclasses.fields(action):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(action, field.name, None)
