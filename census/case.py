"""One case: one architecture, one rank of one layout, one implementation.

Import it after `census.startup.prepare_process`.
"""

import traceback
from pathlib import Path

from census.checkpoint import drawn, make_known, read
from census.comparison import differences, patterns, zeroed
from census.damage import Damage
from census.implementations import Implementation
from census.models import Models, vllm_config_of
from census.modes import Mode
from census.ours import OurSync
from census.outcome import UNSERVED, Outcome, RefusedError, Status, WrongError, overpulling
from census.quantised_checkpoint import QUANTISED
from census.ranks import play_rank
from census.reasons import crash_reason
from census.stock import StockSync
from census.variants import split_variant

__all__ = ["run_case"]

_SYNCS = {Implementation.OURS: OurSync, Implementation.STOCK: StockSync}


def run_case(
    name: str,
    folder: Path,
    mode: Mode,
    implementation: Implementation,
    seed: int,
    damage: Damage | None = None,
) -> Outcome:
    """Load a checkpoint normally, and by a sync into a model that holds other weights; compare.

    Call it once a process. It never raises: what raises
    becomes the outcome, and the trace is printed.

    Args:
        name: the architecture, perhaps with a variant.
        folder: its checkpoint.
        mode: the rank that is played.
        implementation: whose sync.
        seed: of the two sets of weights.
        damage: a fault to put into the replay.
    """
    try:
        make_known(name)
        saved = read(folder)
        old, new = drawn(saved, 2 * seed), drawn(saved, 2 * seed + 1)
        config = vllm_config_of(folder, mode)
        play_rank(config, mode)
        models = Models(config)
        expected = models.loaded(new)
    except Exception as error:
        traceback.print_exc()
        return Outcome(Status.UNBUILDABLE, crash_reason(error))
    try:
        sync = _SYNCS[implementation](models, old)
        synced = sync.run(new, damage)
        if found := differences(expected, synced):
            return Outcome(Status.WRONG, patterns(found))
        reason = overpulling(sync.bytes_pulled, sync.bytes_landed)
        is_quantised = split_variant(name)[1] in QUANTISED
        if is_quantised and sync.unproven:
            sync.check_supported(is_quantised=True)
            note = "; ".join(filter(None, (f"{UNSERVED}{sync.unproven}", reason)))
            return Outcome(Status.EXACT, note, sync.bytes_pulled, sync.bytes_landed, sync.unread)
        if reason:
            return Outcome(Status.WRONG, reason, sync.bytes_pulled, sync.bytes_landed)
        sync.check_supported(is_quantised=is_quantised)
        left = zeroed(expected, synced)
        note = f"{patterns(left)} in part: unwritten by a load, zero by a sync" if left else ""
        return Outcome(Status.EXACT, note, sync.bytes_pulled, sync.bytes_landed, sync.unread)
    except RefusedError as error:
        traceback.print_exc()
        return Outcome(Status.REFUSED, str(error))
    except WrongError as error:
        return Outcome(Status.WRONG, str(error))
    except Exception as error:
        traceback.print_exc()
        return Outcome(Status.WRONG, f"crashed: {crash_reason(error)}")
