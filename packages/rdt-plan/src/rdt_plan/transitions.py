"""The life of one chunk in one epoch, at the consumer and at the producer, as tables.

Whatever is not in a table is illegal and raises. The values of the states are the words of timeout
errors: what the chunk waits for.
"""

from enum import Enum

__all__ = [
    "ABORTING_TRANSITIONS",
    "CHUNK_TRANSITIONS",
    "SERVE_TRANSITIONS",
    "ChunkEvent",
    "ChunkState",
    "ServeEvent",
    "ServeState",
]


class ChunkState(Enum):
    """Where a chunk is at its consumer."""

    AWAITED = "READY not received"
    READABLE = "READ not posted"
    READING = "READ not completed"
    LANDED = "scatter not its turn"
    HANDED_OUT = "scatter not enqueued"
    SCATTERING = "scatter not completed"
    INSTALLED = "installed"
    LOST = "lost"


class ChunkEvent(Enum):
    """What happens to a chunk at its consumer."""

    READY = "READY"
    POSTED = "posted"
    READ_DONE = "read_done"
    DIRECT_READ_DONE = "read_done of a direct chunk"
    READ_FAILED = "read_failed"
    HANDED_OUT = "handed out"
    SCATTER_ENQUEUED = "scatter_enqueued"
    SCATTER_COMPLETED = "scatter_completed"
    SCATTER_FAILED = "scatter_failed"


CHUNK_TRANSITIONS = {
    (ChunkState.AWAITED, ChunkEvent.READY): ChunkState.READABLE,
    (ChunkState.READABLE, ChunkEvent.POSTED): ChunkState.READING,
    (ChunkState.READING, ChunkEvent.READ_DONE): ChunkState.LANDED,
    (ChunkState.READING, ChunkEvent.DIRECT_READ_DONE): ChunkState.INSTALLED,
    (ChunkState.READING, ChunkEvent.READ_FAILED): ChunkState.LOST,
    (ChunkState.LANDED, ChunkEvent.HANDED_OUT): ChunkState.HANDED_OUT,
    (ChunkState.HANDED_OUT, ChunkEvent.SCATTER_ENQUEUED): ChunkState.SCATTERING,
    (ChunkState.HANDED_OUT, ChunkEvent.SCATTER_FAILED): ChunkState.LOST,
    (ChunkState.SCATTERING, ChunkEvent.SCATTER_COMPLETED): ChunkState.INSTALLED,
    (ChunkState.SCATTERING, ChunkEvent.SCATTER_FAILED): ChunkState.LOST,
}
"""Moves of a chunk. A READY in a later state is a repeat: it changes nothing."""

ABORTING_TRANSITIONS = CHUNK_TRANSITIONS | {
    (ChunkState.READING, ChunkEvent.READ_DONE): ChunkState.LOST,
    (ChunkState.READING, ChunkEvent.DIRECT_READ_DONE): ChunkState.LOST,
}
"""The same while aborting: what lands then is not scattered, and does not count."""


class ServeState(Enum):
    """Where a chunk is at its producer."""

    QUEUED = "a free serve slot for {}"  # direct chunks are not queued once they are published
    PACKING = "the pack of {} to be enqueued"
    PACK_ENQUEUED = "the pack of {} to complete"
    ANNOUNCED = "DONE of {}"
    READ = "nothing: {} was read"
    LOST = "nothing: the pack of {} failed"


class ServeEvent(Enum):
    """What happens to a chunk at its producer."""

    STARTED = "started"
    PACK_ENQUEUED = "pack_enqueued"
    PACKED = "packed"
    PACK_FAILED = "pack_failed"
    DONE = "DONE"


SERVE_TRANSITIONS = {
    (ServeState.QUEUED, ServeEvent.STARTED): ServeState.PACKING,
    (ServeState.PACKING, ServeEvent.PACK_ENQUEUED): ServeState.PACK_ENQUEUED,
    (ServeState.PACKING, ServeEvent.PACK_FAILED): ServeState.LOST,
    (ServeState.PACK_ENQUEUED, ServeEvent.PACKED): ServeState.ANNOUNCED,
    (ServeState.PACK_ENQUEUED, ServeEvent.PACK_FAILED): ServeState.LOST,
    (ServeState.ANNOUNCED, ServeEvent.DONE): ServeState.READ,
}
"""Moves of a chunk. DONE is that of its last live reader; a repeat changes nothing."""
