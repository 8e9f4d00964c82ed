"""`python -m rdt_transport.doctor` is `rdt-doctor`."""

import sys

from rdt_transport.doctor.command import main

__all__ = []

if __name__ == "__main__":
    sys.exit(main())
