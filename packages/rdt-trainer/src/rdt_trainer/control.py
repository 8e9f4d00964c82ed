"""The background threads that drive inference servers while the caller's thread gathers."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any

from rdt_trainer.call_thread import CallThread
from rdt_trainer.client import Client
from rdt_trainer.errors import ClientError

__all__ = ["LAST_WORDS_SECONDS", "Control"]

OnEnd = Callable[[BaseException | None], None]

LAST_WORDS_SECONDS = 2.0  # what servers know of a failure says more than our own deadline does


class Control:
    """One thread a client, so that each client's calls follow one another.

    Args:
        clients: by replica; at least one.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = tuple(clients)
        self._threads = [CallThread(f"rdt-control-{r}") for r in range(len(self._clients))]
        self._calls: dict[str, Future[None]] = {}
        self._given_up: set[Future[None]] = set()  # attaching outlived its deadline

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def init(self, init_infos: Mapping[int, Mapping[str, Any]], timeout_seconds: float) -> None:
        """Attach the replicas that are given, at once; returns when all are.

        Raises the first error at once, and `ClientError` naming who has not returned at the
        deadline: the workers', which is ``timeout_seconds`` too, and time to say what they missed.
        """
        self._start(
            {
                replica: partial(self._clients[replica].init, info)
                for replica, info in init_infos.items()
            }
        )
        done, waiting = wait(
            self._calls.values(), timeout_seconds + LAST_WORDS_SECONDS, FIRST_EXCEPTION
        )
        for call in done:
            call.result()
        if waiting:
            self._given_up = waiting
            raise ClientError(
                f"waited {timeout_seconds:g} seconds for the end of init() on "
                f"{', '.join(self.busy())}; raise timeout_seconds if it is only slow",
                server_text="",
            )

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

        self._start({replica: partial(drive, each) for replica, each in enumerate(self._clients)})

    def busy(self) -> list[str]:
        """The clients that are in a call."""
        return [name for name, call in self._calls.items() if not call.done()]

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until no client is in a call; False at the deadline."""
        return not wait(self._calls.values(), timeout_seconds).not_done

    def close(self, timeout_seconds: float) -> list[str]:
        """Detach every replica and end the threads; what went wrong, a sentence a client.

        A client whose `init` outlived its deadline is not waited for again. A thread whose call
        outlives the deadline ends with that call, or with the process.
        """
        hanging = {
            name: call
            for name, call in self._calls.items()
            if call in self._given_up and not call.done()
        }
        self._start(
            {
                replica: each.shutdown
                for replica, each in enumerate(self._clients)
                if self._name(replica) not in hanging
            }
        )
        self.wait(timeout_seconds)
        problems = []
        for call in self._calls.values():
            # What waits behind an earlier call is never made: it could end another job's update.
            if call.done() and not call.cancelled() and (error := call.exception()) is not None:
                problems.append(str(error))
        busy = [*hanging, *self.busy()]
        problems += [f"{name} is still in a call" for name in busy]
        for call in self._calls.values():
            call.cancel()
        for replica, thread in enumerate(self._threads):
            thread.close(wait=self._name(replica) not in busy)
        return problems

    def _start(self, calls: Mapping[int, Callable[[], None]]) -> None:
        """Make one call a replica, each on a thread of its own."""
        self._calls = {
            self._name(replica): self._threads[replica].submit(call)
            for replica, call in calls.items()
        }

    def _name(self, replica: int) -> str:
        return f"replica {replica} ({self._clients[replica].name})"
