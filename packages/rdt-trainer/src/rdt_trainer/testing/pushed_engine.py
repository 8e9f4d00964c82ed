"""A deployment to push into: it remembers what it is told, and does what a test wants in a call."""

from collections.abc import Callable, Mapping
from typing import Any

from rdt_trainer.client import PauseMode
from rdt_trainer.errors import ClientError
from rdt_trainer.testing.torch_engine import TorchEngineClient
from rdt_transport.wire.nixl import NixlWire

__all__ = ["PushedEngine"]


class PushedEngine(TorchEngineClient):
    """A `TorchEngineClient` that pauses and resumes.

    Args:
        num_workers: as there.
        fails: a call that is answered with an error, as a server does: in its words.
        name: what messages call it.
        before: called with the name of each call, before it is made; may raise or wait.

    Attributes:
        update_infos: what each `update` was given.
    """

    def __init__(
        self,
        num_workers: int = 1,
        fails: str = "",
        name: str = "http://engine",
        before: Callable[[str], None] = lambda call: None,
    ) -> None:
        super().__init__(NixlWire, num_workers=num_workers)
        self.name = name
        self.update_infos: list[Mapping[str, Any]] = []
        self._is_paused = False
        self.fails = fails
        self.before = before

    def _begin(self, call: str) -> None:
        self.before(call)
        if call == self.fails:
            self.calls.append(call)
            raise ClientError(f"{self.name}/{call}: HTTP 500: no", server_text="no", status=500)

    def init(self, init_info: Mapping[str, Any]) -> None:
        self._begin("init")
        super().init(init_info)

    def pause(self, mode: PauseMode = "abort") -> None:
        self._begin("pause")
        super().pause(mode)
        self._is_paused = True

    def is_paused(self) -> bool:
        self._begin("is_paused")
        return self._is_paused

    def start(self) -> None:
        self._begin("start")
        super().start()

    def update(self, update_info: Mapping[str, Any]) -> None:
        self._begin("update")
        self.update_infos.append(update_info)
        super().update(update_info)

    def finish(self, weight_version: str | None = None) -> None:
        self._begin("finish")
        super().finish(weight_version)

    def reset_prefix_cache(self) -> None:
        self._begin("reset_prefix_cache")
        super().reset_prefix_cache()

    def resume(self) -> None:
        self._begin("resume")
        super().resume()
        self._is_paused = False
