"""Names that a source serves and no worker anywhere reads: nearly always a name spelled wrongly."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from rdt_plan import Manifest, Subscription
from rdt_trainer.errors import SourceError

__all__ = ["check_consumed"]

MAX_NAMED = 5  # names that one message lists


def check_consumed(
    manifest: Manifest, subscriptions: Iterable[Subscription], unconsumed: Sequence[str]
) -> None:
    """Raises `SourceError` for names in no chunk table of ``subscriptions``, the whole fleet's.

    Which worker reads a name is no matter: an expert may live on any of them. Names that match one
    of the patterns ``unconsumed`` (as a shell's) may be read by nobody, as may tensors without
    elements, which no plan reads. No more subscriptions are taken than it takes to find all names.
    """
    missing = {
        param.name: None
        for param in manifest.params
        if param.numel and not any(fnmatchcase(param.name, pattern) for pattern in unconsumed)
    }
    for subscription in subscriptions if missing else ():
        for table in subscription.tables:
            for chunk in table.chunks:
                for region in chunk.slices:
                    missing.pop(region.name, None)
        if not missing:
            break
    if missing:
        named = [repr(name) for name in list(missing)[:MAX_NAMED]]
        more = [f"and {len(missing) - MAX_NAMED} more"] if len(missing) > MAX_NAMED else []
        raise SourceError(
            f"no worker of any replica reads {len(missing)} of the {len(manifest.params)} names "
            f"that the source serves: {', '.join(named + more)}; expected each to be a name of the "
            "checkpoint that the engine's loaders know: map it (ModuleSource(names=...)), leave it "
            f"out, or allow it with RdtTrainer(unconsumed=[{named[0]}, ...])"
        )
