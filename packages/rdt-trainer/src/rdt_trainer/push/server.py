"""One server that is pushed to: it serves old weights, then nothing, then new weights."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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

    Attributes:
        checksums: what `update` tells the workers to find; None: nothing is verified.
        is_paused: it was told to pause, and not yet to resume.
        was_paused: it was paused before it was told to.
        weights: which it has.
    """

    def __init__(
        self, client: Client, pause_mode: PauseMode, check: Callable[[], None] = lambda: None
    ) -> None:
        self.name = client.name
        self.num_workers: int = getattr(client, "num_workers", 0)
        self.checksums: Mapping[str, Any] | None = None
        self.is_paused = self.was_paused = False
        self.weights = Weights.OLD
        self._client = client
        self._pause_mode = pause_mode
        self._check = check
        self._is_pausing = False
        self._is_given_up = False
        self._lock = threading.Lock()  # who recovers and who updates agree on who came first

    def init(self, init_info: Mapping[str, Any]) -> None:
        self._look()
        self._client.init(init_info)

    def start(self) -> None:
        """Pause, then open an update."""
        self._look()  # again: somebody may have paused it since it attached
        self.is_paused = self._is_pausing = True  # it may be paused also where the call fails
        try:
            self._client.pause(self._pause_mode)
        finally:
            self._is_pausing = False
            if self._is_given_up and not self.was_paused:  # requests took too long to end
                self._resume()
        if self._is_given_up:
            raise self._given_up()
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
        if not stays:
            try:
                self._client.resume()
            except ClientError:
                return  # the reason why it failed is told already
            self.is_paused = self._is_pausing  # one under way may yet pause it

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
