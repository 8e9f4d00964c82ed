"""Where `rdt-push` begins: it can be interrupted at any time, also before torch is imported."""

import sys
from collections.abc import Sequence

from rdt_trainer.push.interrupts import ended_by_signals

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """`rdt_trainer.push.command.main`, which takes seconds to import; meanwhile signals end it."""
    as_json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    with ended_by_signals(as_json):
        from rdt_trainer.push import command
    return command.main(arguments)
