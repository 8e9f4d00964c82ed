"""``python -m rdt_trainer.push`` is `rdt-push`."""

import sys

from rdt_trainer.push.entry import main

__all__ = []

if __name__ == "__main__":
    sys.exit(main())
