"""The background threads that drive inference servers while the caller's thread gathers."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from rdt_trainer.client import Client

__all__ = ["Control"]

OnEnd = Callable[[BaseException | None], None]


class Control:
    """One thread a client, so that each client's calls follow one another.

    Args:
        clients: by replica; at least one.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = tuple(clients)
        self._threads = ThreadPoolExecutor(len(self._clients), thread_name_prefix="rdt-control")
        self._calls: dict[str, Future[None]] = {}

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def init(self, init_infos: Sequence[Mapping[str, Any]]) -> None:
        """Attach every replica at once; returns when all are, raises the first error at once."""
        infos = iter(init_infos)
        self._start(lambda client: client.init(next(infos)))
        done, _ = wait(self._calls.values(), return_when=FIRST_EXCEPTION)
        for call in done:
            call.result()

    def sync(
        self, update_info: Mapping[str, Any], weight_version: str | None, on_end: OnEnd
    ) -> None:
        """Drive every client through one update; returns at once.

        ``on_end`` is called on each client's thread, with its error or None.
        """

        def drive(client: Client) -> None:
            try:
                client.start()
                client.update(update_info)
                client.finish(weight_version)
            except BaseException as error:
                on_end(error)
            else:
                on_end(None)

        self._start(drive)

    def busy(self) -> list[str]:
        """The clients that are in a call."""
        return [name for name, call in self._calls.items() if not call.done()]

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until no client is in a call; False at the deadline."""
        return not wait(self._calls.values(), timeout_seconds).not_done

    def close(self, timeout_seconds: float) -> list[str]:
        """Detach every replica and end the threads; what went wrong, a sentence a client.

        A thread whose call outlives the deadline ends with that call.
        """
        deadline = time.monotonic() + timeout_seconds
        problems: list[str] = []
        if self.wait(timeout_seconds):
            self._start(lambda client: client.shutdown())
            self.wait(max(0.0, deadline - time.monotonic()))
            failed = [call.exception() for call in self._calls.values() if call.done()]
            problems += [str(error) for error in failed if error is not None]
        problems += [f"{name} is still in a call" for name in self.busy()]
        self._threads.shutdown(wait=not self.busy())
        return problems

    def _start(self, function: Callable[[Client], None]) -> None:
        """Call ``function`` with every client, each on a thread of its own."""
        self._calls = {
            f"replica {replica} ({client.name})": self._threads.submit(function, client)
            for replica, client in enumerate(self._clients)
        }
