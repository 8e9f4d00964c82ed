"""`rdt-doctor`: which path reads take on this machine, how fast, and what would help."""

import argparse
import json
import math
import sys
from collections.abc import Sequence

from rdt_transport.doctor.examine import TIMEOUT_SECONDS, devices, examine
from rdt_transport.doctor.remote import parse_address, serve
from rdt_transport.doctor.report import as_json, as_text
from rdt_transport.doctor.verdict import diagnose, exit_status
from rdt_transport.errors import RdtTransportError

__all__ = ["main"]

_INTERRUPTED = 130  # as shells say it
_EXIT = (
    "exit status: 1 a pair reads along a slow path, 2 something was not measured, "
    f"{_INTERRUPTED} interrupted by Ctrl-C, else 0"
)
_VISIT_SECONDS = 600.0


def _address(text: str) -> str:
    try:
        parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _seconds(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, above 0, found {text}")
    return number


def _bytes(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected bytes, at least 1, found {text}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rdt-doctor", description=__doc__, epilog=_EXIT)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ring-bytes", type=_bytes, help="see whether rings of that size fit")
    parser.add_argument("--timeout", type=_seconds, help="seconds of every wait")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--peer", type=_address, help="host:port of another machine's --serve")
    way.add_argument("--serve", action="store_true", help="let one --peer read from here")
    parser.add_argument(
        "--listen", type=_address, default="127.0.0.1:0", help="where --serve waits (%(default)s)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.serve:
            _serve(options.listen, options.timeout or _VISIT_SECONDS)
            return 0
        found = examine(
            ring_bytes=options.ring_bytes,
            peer=options.peer,
            timeout_seconds=options.timeout or TIMEOUT_SECONDS,
        )
    except RdtTransportError as error:
        print(f"rdt-doctor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rdt-doctor: interrupted", file=sys.stderr)
        return _INTERRUPTED
    findings = diagnose(found)
    if options.json:
        print(json.dumps(as_json(found, findings)))
    else:
        print(as_text(found, findings))
    return exit_status(findings)


def _serve(listen: str, timeout_seconds: float) -> None:
    def announce(address: str) -> None:
        print(f"serving; on the other machine: rdt-doctor --peer {address}", flush=True)

    host, port = parse_address(listen)
    serve(host, port, devices(), announce=announce, timeout_seconds=timeout_seconds)
