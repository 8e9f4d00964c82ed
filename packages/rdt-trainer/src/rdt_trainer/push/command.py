"""`rdt-push`: push a safetensors checkpoint into running vLLM servers."""

import importlib.metadata
import json
import logging
import socket
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.logging import RichHandler

from rdt_plan.errors import RdtPlanError
from rdt_trainer.arguments import MAX_SECONDS
from rdt_trainer.errors import RdtTrainerError, SettingsError, SourceError
from rdt_trainer.http_client import HttpClient
from rdt_trainer.push.display import StageProgress, show_outcome, wide_console
from rdt_trainer.push.interrupts import ENDED, SignalInterrupt, interrupted_by_signals
from rdt_trainer.push.pushing import PushOptions, push
from rdt_trainer.push.wording import PlainFormatter, plain
from rdt_transport.errors import RdtTransportError

__all__ = ["EXIT_STATUS", "app", "main"]

EXIT_STATUS = {
    0: "every server serves the new weights, also one that was paused before (with --dry-run: "
    "would get them)",
    1: "some server failed; the others serve them",
    2: "bad input: options, or a checkpoint that is not whole, or has names that all loaders pass "
    "over and no worker reads; nothing was changed",
    3: "no server serves them: one is not there or refuses, also another model's checkpoint and "
    "names that its loaders do not know, so nothing was changed; or all failed, and one that is "
    "left paused may hold a mixture",
    70: "an error of rdt-push's own; its traceback says where",
    **ENDED,
}

_UNCHANGED = "nothing was changed: no server was paused or updated"

_HELP = """Push a safetensors checkpoint into running vLLM servers.

Each server pauses, every worker pulls the slices it uses out of the checkpoint's files, the \
prefix cache is cleared, and the server serves on: no completion mixes old and new weights. The \
servers run with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "rdt"}'."""

_EPILOG = "Exit status: " + "; ".join(f"{code} {text}" for code, text in EXIT_STATUS.items()) + "."

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class PauseModes(StrEnum):
    """Of requests in flight; vLLM's third, to keep them, would mix weights in their completions."""

    WAIT = "wait"
    ABORT = "abort"


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"rdt-push {importlib.metadata.version('rdt-trainer')}")
        raise typer.Exit


@app.command(help=_HELP, epilog=_EPILOG)
def _command(
    checkpoint: Annotated[
        Path, typer.Argument(help="folder, index or file, of safetensors", show_default=False)
    ],
    url: Annotated[
        list[str], typer.Option(help="a server, as http://host:8000; repeat it", show_default=False)
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print who would read what; push nothing, pause none")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="have every worker compare what it got, slice by slice"),
    ] = False,
    pause_mode: Annotated[
        PauseModes, typer.Option(help="let requests in flight end, or abort them")
    ] = PauseModes.WAIT,
    weight_version: Annotated[
        str | None, typer.Option(help="what servers report; else the checkpoint's own name")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="the servers'", show_envvar=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    host: Annotated[
        str | None, typer.Option(help="this machine's address for workers; else found out")
    ] = None,
    num_workers: Annotated[
        int, typer.Option(min=0, help="workers of each server; 0: they tell")
    ] = 0,
    unconsumed: Annotated[
        list[str] | None, typer.Option(help="pattern of tensors that need no reader; repeat it")
    ] = None,
    staged: Annotated[
        bool, typer.Option("--staged", help="read through slots, not from the mapped files")
    ] = False,
    device: Annotated[
        str, typer.Option(help="cpu: read the mapped files; cuda: copies on this machine's GPU")
    ] = "cpu",
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="print it, and end"),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            min=1.0, max=MAX_SECONDS, help="seconds of every wait; half of it to be paused"
        ),
    ] = 600.0,
) -> None:
    errors = Console(stderr=True)
    handler = RichHandler(console=errors, show_path=False)
    handler.setFormatter(PlainFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    progress = StageProgress(errors)
    try:
        urls = list(dict.fromkeys(map(_server_url, url)))
        options = PushOptions(
            weight_version=weight_version or checkpoint.absolute().name,
            pause_mode=pause_mode.value,
            dry_run=dry_run,
            verify=verify,
            host=_address_towards(urls) if host is None else _own_address(host),
            staged=staged,
            device=device,
            unconsumed=unconsumed or (),
            timeout_seconds=timeout,
        )
        with ExitStack() as stack:
            clients = [
                HttpClient(each, api_key=api_key, num_workers=num_workers, timeout_seconds=timeout)
                for each in urls
            ]
            for client in clients:
                stack.callback(client.close)
            with nullcontext() if as_json else progress:
                on_progress = (lambda *_: None) if as_json else progress.begin
                outcome = push(checkpoint, clients, options, on_progress)
    except KeyboardInterrupt as interrupt:
        status = 128 + interrupt.number if isinstance(interrupt, SignalInterrupt) else 130
        # Who was in a call when it came has been let go since, and each server's state is told.
        notes = [each for each in _notes(interrupt) if not each.endswith("is still in a call")]
        _tell(errors, [EXIT_STATUS[status], *notes], status, as_json)
        raise typer.Exit(status) from None
    except (RdtTrainerError, RdtPlanError, RdtTransportError) as error:
        status = 2 if isinstance(error, (SettingsError, SourceError, RdtPlanError)) else 3
        _tell(errors, [str(error), *_notes(error), _UNCHANGED], status, as_json)
        raise typer.Exit(status) from error
    if as_json:
        print(json.dumps(outcome.to_json()))
    else:
        show_outcome(wide_console(), outcome)
    raise typer.Exit(outcome.exit_status)


def _notes(error: BaseException) -> Sequence[str]:
    return getattr(error, "__notes__", ())


def _tell(errors: Console, said: Sequence[str], status: int, as_json: bool) -> None:
    """Why nothing was pushed, and whatever else is to be known of it."""
    told = [plain(each) for each in said]
    for line in told:
        errors.print(f"rdt-push: {line}", style="red", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps({"error": "; ".join(told), "exit_status": status}))


def _server_url(text: str) -> str:
    """The URL in one form, as a server that is given twice is pushed to once.

    Raises `SettingsError` for one without a host.
    """
    try:
        parsed = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise SettingsError(f"--url {text}: {error}; expected http://host:port") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise SettingsError(f"--url {text}: expected http://host:port")
    if parsed.path.strip("/"):
        raise SettingsError(f"--url {text}: expected http://host:port; give no path")
    return str(parsed).rstrip("/")


def _own_address(host: str) -> str:
    """``host`` if this machine can listen there; `SettingsError` otherwise."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(where)
    except OSError as error:
        raise SettingsError(
            f"--host {host}: {error}; expected an address of this machine that workers reach"
        ) from error
    return host


def _address_towards(urls: Sequence[str]) -> str:
    """This machine's address on the way to the servers; a loopback one only if all are here.

    Raises `SettingsError` for a URL whose host cannot be found.
    """
    found = []
    for url in urls:
        parsed = httpx.URL(url)
        port = parsed.port or (443 if parsed.scheme == "https" else 80)
        try:
            family, _, _, _, where = socket.getaddrinfo(parsed.host, port)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
                probe.connect(where)
                found.append(probe.getsockname()[0])
        except (OSError, OverflowError) as error:
            raise SettingsError(f"--url {url}: {error}; expected http://host:port") from error
    return next((each for each in found if not each.startswith(("127.", "::1"))), found[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status, see `EXIT_STATUS`."""
    try:
        with interrupted_by_signals():
            app(args=None if arguments is None else list(arguments), prog_name="rdt-push")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 70
    except Exception:
        traceback.print_exc()
        return 70
    return 0
