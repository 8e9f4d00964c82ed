"""One server that is pushed to: it serves old weights, then nothing, then new weights."""

from collections.abc import Mapping
from typing import Any

from rdt_trainer.client import Client, PauseMode
from rdt_trainer.errors import ClientError

__all__ = ["PushedServer"]


class PushedServer:
    """A `Client` that stops the server right before its update and starts it right after.

    A server that fails before its weights are touched is let go on with the old ones by `recover`;
    one that fails later stays paused.

    Args:
        client: drives the server.
        pause_mode: what becomes of requests in flight.

    Attributes:
        checksums: what `update` tells the workers to find; None: nothing is verified.
        is_paused: it was told to pause, and not yet to resume.
    """

    def __init__(self, client: Client, pause_mode: PauseMode) -> None:
        self.name = client.name
        self.num_workers: int = getattr(client, "num_workers", 0)
        self.checksums: Mapping[str, Any] | None = None
        self.is_paused = False
        self._client = client
        self._pause_mode = pause_mode
        self._is_touched = False
        self._is_given_up = False

    def init(self, init_info: Mapping[str, Any]) -> None:
        self._client.init(init_info)

    def start(self) -> None:
        """Pause, then open an update."""
        self.is_paused = True  # it may be, also where the call fails
        self._client.pause(self._pause_mode)
        if self._is_given_up:  # requests took too long to end: the pause came too late
            self._client.resume()
            raise ClientError(f"{self.name}: it was given up before it was paused", server_text="")
        self._client.start()

    def update(self, update_info: Mapping[str, Any]) -> None:
        """Receive the weights, and verify them where `checksums` are given."""
        self._is_touched = True
        added = {} if self.checksums is None else {"checksums": self.checksums}
        self._client.update({**update_info, **added})

    def finish(self, weight_version: str | None = None) -> None:
        """Install, forget what was cached of the old weights, and serve again."""
        self._client.finish(weight_version)
        self._client.reset_prefix_cache()
        self._client.resume()
        self.is_paused = False

    def recover(self) -> None:
        """Serve on with the old weights, where they were not touched; any thread."""
        self._is_given_up = True
        if self.is_paused and not self._is_touched:
            try:
                self._client.resume()
            except ClientError:
                return  # the reason why it failed is told already
            self.is_paused = False

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
