"""The two roles of one epoch of a session, as pure state machines.

`ConsumerEpoch` and `ProducerEpoch` share no state: they meet only in the messages READY and DONE,
which a driver carries. `rdt_plan.simulate` runs them against each other.
"""

from rdt_plan.consumer_epoch import ConsumerAction, ConsumerEpoch, PostRead, Scatter
from rdt_plan.epoch import EpochState, Finished, Quiesced
from rdt_plan.producer_epoch import Pack, ProducerAction, ProducerEpoch, Ready, Release

__all__ = [
    "ConsumerAction",
    "ConsumerEpoch",
    "EpochState",
    "Finished",
    "Pack",
    "PostRead",
    "ProducerAction",
    "ProducerEpoch",
    "Quiesced",
    "Ready",
    "Release",
    "Scatter",
]
