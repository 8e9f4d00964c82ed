"""What one producer's epoch asks its driver to do."""

from dataclasses import dataclass

from rdt_plan.epoch import Finished, Quiesced
from rdt_plan.identity import ConsumerId

__all__ = ["Pack", "ProducerAction", "Ready", "Release"]


@dataclass(frozen=True, slots=True)
class Pack:
    """Pack chunk ``seq`` into its serve slot of ``ring``, then report `pack_enqueued`.

    A direct chunk has nothing to copy: its pack is the publisher's event, which says that the
    tensors hold what was published. A ring is called by the plan digest of its readers.
    """

    ring: str
    seq: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Tell ``consumer`` that its chunk ``seq`` is readable."""

    consumer: ConsumerId
    seq: int


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody needs the tensors of ``group`` any more: neither a live consumer nor a pack."""

    group: int


ProducerAction = Pack | Ready | Release | Finished | Quiesced
