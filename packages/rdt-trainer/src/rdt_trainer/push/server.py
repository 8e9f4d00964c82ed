"""One server that is pushed to: it serves old weights, then nothing, then new weights."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from rdt_trainer.call_thread import CallThread
from rdt_trainer.client import Client, PauseMode
from rdt_trainer.errors import ClientError
from rdt_trainer.push.outcome import Weights

__all__ = ["PushedServer", "recover_all"]


class PushedServer:
    """A `Client` that stops the server right before its update and starts it right after.

    A server that fails before its weights are touched is let go on with the old ones by `recover`;
    one that fails later stays paused. So does one that was paused already, perhaps torn by an
    earlier push: only a complete one lets it serve.

    Args:
        client: drives the server.
        pause_mode: what becomes of requests in flight.
        check: called when the weights are in, before the server serves them; may raise.
        on_step: called with "reached" once it answers, and "paused" once its pause has ended,
            well or not; on the thread that drives it.

    Attributes:
        checksums: what `update` tells the workers to find; None: nothing is verified.
        is_paused: it was told to pause, and not yet to resume.
        is_pausing: the call that pauses it has not ended.
        was_paused: it was paused before it was told to.
        weights: which it has.
    """

    def __init__(
        self,
        client: Client,
        pause_mode: PauseMode,
        check: Callable[[], None] = lambda: None,
        on_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        self.name = client.name
        self.num_workers: int = getattr(client, "num_workers", 0)
        self.checksums: Mapping[str, Any] | None = None
        self.is_paused = self.was_paused = self.is_pausing = False
        self.weights = Weights.OLD
        self._client = client
        self._pause_mode = pause_mode
        self._check = check
        self._on_step = on_step
        self._is_given_up = False
        self._decided = threading.Event()  # it is paused, or could not be, or was given up
        self._letting_go = threading.Lock()
        self._lock = threading.Lock()  # who recovers and who updates agree on who came first

    def init(self, init_info: Mapping[str, Any]) -> None:
        self._look()
        self._on_step("reached")
        self._client.init(init_info)

    def start(self) -> None:
        """Pause, then open an update; not for longer than until it is given up."""
        self._look()  # again: somebody may have paused it since it attached
        with self._lock:
            if self._is_given_up:
                raise self._given_up()
            self.is_paused = self.is_pausing = True  # it may be paused also where the call fails
        thread = CallThread("rdt-push-pause")
        pause = thread.submit(self._pause)
        thread.close(wait=False)
        pause.add_done_callback(lambda _: self._decided.set())
        self._decided.wait()  # the client has a deadline
        if self._is_given_up:
            raise self._given_up()
        self._on_step("paused")
        pause.result()
        self._client.start()

    def update(self, update_info: Mapping[str, Any]) -> None:
        """Receive the weights, and verify them where `checksums` are given."""
        with self._lock:
            if self._is_given_up:  # it serves, or soon will
                raise self._given_up()
            self.weights = Weights.UNKNOWN
        added = {} if self.checksums is None else {"checksums": self.checksums}
        self._client.update({**update_info, **added})

    def finish(self, weight_version: str | None = None) -> None:
        """Install, forget what was cached of the old weights, and serve again."""
        self._client.finish(weight_version)
        self._check()
        self.weights = Weights.NEW
        self._client.reset_prefix_cache()
        self._resume()

    def recover(self) -> None:
        """Serve on with the old weights, where they were not touched; any thread."""
        with self._lock:
            self._is_given_up = True
            is_touched = self.weights is not Weights.OLD
            stays = is_touched or self.was_paused or not self.is_paused
        self._decided.set()
        if not stays:
            self._let_go()

    def pause(self, mode: PauseMode = "abort") -> None:
        self._client.pause(mode)

    def resume(self) -> None:
        self._client.resume()

    def reset_prefix_cache(self) -> None:
        self._client.reset_prefix_cache()

    def shutdown(self) -> None:
        self._client.shutdown()

    def close(self) -> None:
        self._client.close()

    def _look(self) -> None:
        if (is_paused := getattr(self._client, "is_paused", None)) is not None:
            self.is_paused = self.was_paused = is_paused()

    def _pause(self) -> None:
        try:
            self._client.pause(self._pause_mode)
        finally:
            with self._lock:
                self.is_pausing = False
                is_late = self._is_given_up and not self.was_paused
            if is_late:  # requests took too long to end
                self._let_go()

    def _let_go(self) -> None:
        """Resume, and ask what came of it. The reason why it failed is told already."""
        with self._letting_go:  # who comes last tells
            with suppress(ClientError):
                self._resume()
            with suppress(ClientError):
                if (ask := getattr(self._client, "is_paused", None)) is not None:
                    self.is_paused = ask()

    def _resume(self) -> None:
        self._client.resume()
        self.is_paused = False

    def _given_up(self) -> ClientError:
        return ClientError(
            f"{self.name}: it was given up before its weights were touched", server_text=""
        )


def recover_all(servers: Iterable[PushedServer], timeout_seconds: float) -> None:
    """`PushedServer.recover` of all at once: one that hangs holds up no other, nor the end."""
    threads = [threading.Thread(target=each.recover, daemon=True) for each in servers]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
