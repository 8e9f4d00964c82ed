"""What the ranks of one layout make together: between them they pull every name."""

from collections.abc import Sequence
from pathlib import Path

import torch

from census.checkpoint import drawn, make_known, read
from census.comparison import differences, patterns
from census.models import Models, vllm_config_of
from census.modes import Mode
from census.outcome import Outcome, Status
from census.ranks import play_rank
from rdt_vllm.testing.bits import to_bytes

__all__ = ["ignored", "merged", "what_counts"]

# What one rank's outcome is worth beside the others'.
_WEIGHTS = (Status.EXACT, Status.UNBUILDABLE, Status.REFUSED, Status.WRONG)


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """The worst of one outcome a rank; of exact ones the sum, and what none of them reads."""
    rank, worst = max(
        enumerate(outcomes),
        key=lambda each: (_WEIGHTS.index(each[1].status), bool(each[1].reason), -each[0]),
    )
    if len(outcomes) == 1:
        return worst
    if worst.status is not Status.EXACT:
        return Outcome(worst.status, f"rank {rank}: {worst.reason}")
    return Outcome(
        Status.EXACT,
        worst.reason,
        sum(each.bytes_pulled for each in outcomes),
        sum(each.bytes_landed for each in outcomes),
        frozenset.intersection(*(each.unread for each in outcomes)),
    )


def what_counts(
    name: str, folder: Path, mode: Mode, seed: int, names: frozenset[str]
) -> tuple[str, ...]:
    """What of a rank's model a normal load makes of the values of ``names``; once a process.

    Nothing, if the model's own loaders ignore these tensors: then no other values of theirs change
    the model.
    """
    make_known(name)
    weights = drawn(read(folder), 2 * seed + 1)
    config = vllm_config_of(folder, mode)
    play_rank(config, mode)
    models = Models(config)
    other = {each: _with_other_bits(weights[each]) for each in names}
    return tuple(differences(models.loaded(weights), models.loaded(weights | other)))


def ignored(outcome: Outcome, counts: Sequence[str]) -> Outcome:
    """What becomes of ranks that all leave names unread, given what a load makes of these."""
    unread = patterns(outcome.unread)
    if counts:
        reason = f"no rank reads {unread}, and a normal load does: {patterns(counts)}"
        return Outcome(Status.WRONG, reason)
    notes = [f"vLLM's own loaders ignore {unread}", outcome.reason]
    return Outcome(
        Status.EXACT,
        "; ".join(filter(None, notes)),
        outcome.bytes_pulled,
        outcome.bytes_landed,
        outcome.unread,
    )


def _with_other_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Finite where ``tensor`` is: the lowest bit of every byte is flipped, or of every truth."""
    if tensor.dtype is torch.bool:
        return ~tensor
    return (to_bytes(tensor) ^ 1).view(tensor.dtype).view(tensor.shape)
