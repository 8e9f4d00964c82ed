"""The background threads that drive inference servers while the caller's thread gathers."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any

from rdt_trainer.call_thread import CallThread
from rdt_trainer.client import Client, steps
from rdt_trainer.errors import ClientError

__all__ = ["LAST_WORDS_SECONDS", "START_WITH_RDT", "Control"]

OnEnd = Callable[[int, BaseException | None], None]

START_WITH_RDT = 'start the server with --weight-transfer-config \'{"backend": "rdt"}\''

# What vLLM says that has no weight transfer, or another backend's, which reads other fields.
_OTHER_BACKEND = re.compile(
    r"Weight transfer not configured|Invalid init_info for (?!Rdt)|unexpected keyword .*'address'"
)

LAST_WORDS_SECONDS = 2.0  # what servers know of a failure says more than our own deadline does


class Control:
    """One thread a client, so that each client's calls follow one another.

    Args:
        clients: of replicas 0, 1, ...
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients: dict[int, Client] = {}
        self._threads: dict[int, CallThread] = {}
        self._calls: dict[int, Future[None]] = {}  # the last one of each replica
        self._doing: dict[int, str] = {}
        self._given_up: set[Future[None]] = set()  # attaching outlived its deadline
        self._attached: set[int] = set()  # by their last init
        for replica, client in enumerate(clients):
            self.add(replica, client)

    def add(self, replica: int, client: Client) -> None:
        """Drive one more client: a thread that waits for calls, no call yet."""
        self._clients[replica] = client
        self._threads[replica] = CallThread(f"rdt-control-{replica}")

    def remove(self, replica: int, timeout_seconds: float) -> list[str]:
        """Detach one replica and drive it no more; what went wrong, as `close` says it."""
        problems = self._detach([replica], timeout_seconds)
        self._end([replica])
        for books in (self._clients, self._threads, self._calls, self._doing):
            books.pop(replica, None)
        self._attached.discard(replica)
        return problems

    def init(self, init_infos: Mapping[int, Mapping[str, Any]], timeout_seconds: float) -> None:
        """Attach the replicas that are given, at once; returns when all are.

        Raises the first error at once, and `ClientError` naming who has not returned at the
        deadline: the workers', which is ``timeout_seconds`` too, and time to say what they missed.
        """
        calls = self._start_init(init_infos)
        done, waiting = wait(calls, timeout_seconds + LAST_WORDS_SECONDS, FIRST_EXCEPTION)
        for call in done:
            call.result()
        if waiting:
            self._given_up |= waiting
            raise self.overdue([calls[call] for call in waiting], timeout_seconds)

    def init_each(
        self, init_infos: Mapping[int, Mapping[str, Any]], timeout_seconds: float
    ) -> dict[int, BaseException]:
        """Like `init`, but each for itself: returns when all are attached or failed, who and why.

        Who has not returned at the deadline is left in its call.
        """
        calls = self._start_init(init_infos)
        done, waiting = wait(calls, timeout_seconds + LAST_WORDS_SECONDS)
        self._given_up |= waiting
        errors = {calls[call]: error for call in done if (error := call.exception()) is not None}
        return errors | {calls[c]: self.overdue([calls[c]], timeout_seconds) for c in waiting}

    def sync(
        self,
        replicas: Iterable[int],
        update_info: Mapping[str, Any],
        weight_version: str | None,
        on_end: OnEnd,
    ) -> None:
        """Drive these replicas' clients through one update; returns at once.

        ``on_end`` is called on each client's thread, with its replica and its error or None.
        """

        def drive(replica: int, calls: Iterator[str]) -> None:
            try:
                for doing in calls:
                    self._doing[replica] = doing
            except BaseException as error:
                on_end(replica, error)
            else:
                on_end(replica, None)

        chosen = list(replicas)
        self._doing.update(dict.fromkeys(chosen, "start"))
        for replica in chosen:
            calls = self._submitted(replica, update_info, weight_version)
            self._start({replica: partial(drive, replica, calls)})

    def overdue(self, replicas: Iterable[int], timeout_seconds: float) -> ClientError:
        """The error of calls to these replicas that did not end in time."""
        named = [f"{self._doing[each]}() on {self._name(each)}" for each in sorted(replicas)]
        return ClientError(
            f"waited {timeout_seconds:g} seconds for the end of {', '.join(named)}; raise "
            "timeout_seconds if it is only slow",
            server_text="",
        )

    def is_finishing(self, replica: int) -> bool:
        """Whether an update of that replica has got as far as its last call."""
        return self._doing[replica] == "finish"

    def is_busy(self, replica: int) -> bool:
        """Whether that replica's client is in a call."""
        return replica in self._calls and not self._calls[replica].done()

    def busy(self) -> list[str]:
        """The clients that are in a call."""
        return [self._name(replica) for replica in sorted(self._calls) if self.is_busy(replica)]

    def wait(self, timeout_seconds: float, replicas: Iterable[int] | None = None) -> bool:
        """Wait until no client, or none of these replicas', is in a call; False at the deadline."""
        chosen = self._calls if replicas is None else self._calls.keys() & set(replicas)
        return not wait([self._calls[each] for each in chosen], timeout_seconds).not_done

    def close(self, timeout_seconds: float) -> list[str]:
        """Detach every replica and end the threads; what went wrong, a sentence a client.

        Who did not attach is not detached: a server that refused may be another trainer's. A client
        whose `init` outlived its deadline is not waited for again. A thread whose call outlives the
        deadline ends with that call, or with the process.
        """
        problems = self._detach(list(self._clients), timeout_seconds)
        self._end(self._clients)
        return problems

    def _detach(self, replicas: Sequence[int], timeout_seconds: float) -> list[str]:
        busy = filter(self.is_busy, replicas)
        hanging = [replica for replica in busy if self._calls[replica] in self._given_up]
        others = [replica for replica in replicas if replica not in hanging]
        self._start({replica: partial(self._shutdown, replica) for replica in others})
        self.wait(timeout_seconds, others)
        problems = []
        for replica in others:
            call = self._calls[replica]
            if call.done() and (error := call.exception()) is not None:
                problems.append(str(error))
        late = [replica for replica in replicas if self.is_busy(replica)]
        return problems + [f"{self._name(replica)} is still in a call" for replica in late]

    def _end(self, replicas: Iterable[int]) -> None:
        for replica in replicas:
            is_busy = self.is_busy(replica)
            # What waits behind an earlier call is never made: it could end another job's update.
            self._calls[replica].cancel()
            self._threads[replica].close(wait=not is_busy)

    def _start_init(self, init_infos: Mapping[int, Mapping[str, Any]]) -> dict[Future[None], int]:
        self._doing.update(dict.fromkeys(init_infos, "init"))
        self._start({each: partial(self._init, each, info) for each, info in init_infos.items()})
        return {self._calls[replica]: replica for replica in init_infos}

    def _init(self, replica: int, init_info: Mapping[str, Any]) -> None:
        self._attached.discard(replica)
        try:
            self._clients[replica].init(init_info)
        except ClientError as error:
            if not _OTHER_BACKEND.search(error.server_text):
                raise
            raise ClientError(
                f"{error}; {START_WITH_RDT}", server_text=error.server_text, status=error.status
            ) from error
        self._attached.add(replica)

    def _shutdown(self, replica: int) -> None:
        if replica in self._attached:  # also by an init that hung until now
            self._attached.discard(replica)
            self._clients[replica].shutdown()

    def _submitted(
        self, replica: int, update_info: Mapping[str, Any], weight_version: str | None
    ) -> Iterator[str]:
        """What takes a client through one update; what it can hand in at once is on its way."""
        client = self._clients[replica]
        if (submit := getattr(client, "submit", None)) is None:
            return steps(client, update_info, weight_version)
        try:
            return submit(update_info, weight_version)
        except Exception as error:  # that replica's alone, like any of a call
            return _failing(error)

    def _start(self, calls: Mapping[int, Callable[[], None]]) -> None:
        """Make one call a replica, each on a thread of its own."""
        self._calls |= {each: self._threads[each].submit(call) for each, call in calls.items()}

    def _name(self, replica: int) -> str:
        return f"replica {replica} ({self._clients[replica].name})"


def _failing(error: Exception) -> Iterator[str]:
    yield "start"
    raise error
