"""Every state of a chunk at its producer with every event: as the table says, or refused."""

from itertools import product

import pytest

from rdt_plan.errors import ProtocolError
from rdt_plan.identity import ConsumerId
from rdt_plan.producer_epoch import Pack, ProducerEpoch
from rdt_plan.testing import serve_table, snapshot
from rdt_plan.transitions import SERVE_TRANSITIONS, ServeEvent, ServeState

A, B = ConsumerId(0, 0), ConsumerId(0, 1)  # each of its own plan, which its name stands for


PATHS = {
    ServeState.QUEUED: [],
    ServeState.PACKING: [ServeEvent.STARTED],
    ServeState.PACK_ENQUEUED: [ServeEvent.STARTED, ServeEvent.PACK_ENQUEUED],
    ServeState.ANNOUNCED: [ServeEvent.STARTED, ServeEvent.PACK_ENQUEUED, ServeEvent.PACKED],
    ServeState.READ: [
        ServeEvent.STARTED,
        ServeEvent.PACK_ENQUEUED,
        ServeEvent.PACKED,
        ServeEvent.DONE,
    ],
}
DRIVER_EVENTS = [ServeEvent.PACK_ENQUEUED, ServeEvent.PACKED, ServeEvent.PACK_FAILED]


def fire(epoch: ProducerEpoch, event: ServeEvent, consumer: ConsumerId, seq: int) -> list:
    if event is ServeEvent.DONE:
        return epoch.done(consumer, seq)
    reason = ("why",) if event is ServeEvent.PACK_FAILED else ()
    return getattr(epoch, event.value)(str(consumer), seq, *reason)


@pytest.mark.parametrize(
    ("state", "event", "end"), list(product(PATHS, DRIVER_EVENTS, ("", "abort", "drop")))
)
def test_every_move_follows_the_table_or_is_refused(
    state: ServeState, event: ServeEvent, end: str
) -> None:
    """A's chunk is the one tried; B's pack is in flight, so that an abort does not end at once."""
    epoch = ProducerEpoch({A: serve_table(A, [1]), B: serve_table(B, [0])}, [0, 1], lookahead=1)
    epoch.publish(0)
    for step in PATHS[state]:
        if step is ServeEvent.STARTED:
            assert epoch.publish(1) == [Pack(str(A), 0)]
        else:
            fire(epoch, step, A, 0)
    if end == "abort":
        epoch.abort("enough")
    elif end == "drop":
        epoch.drop(A, "gone")
    before = snapshot(epoch)
    if (state, event) in SERVE_TRANSITIONS:
        fire(epoch, event, A, 0)
        assert snapshot(epoch) != before
    else:
        with pytest.raises(ProtocolError):
            fire(epoch, event, A, 0)
        assert snapshot(epoch) == before
