"""A client of vLLM's shape, as one of ours; vLLM itself is not imported."""

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

from rdt_trainer.client import PauseMode
from rdt_trainer.errors import ClientError

__all__ = ["FourCallsClient"]


class FourCallsClient:
    """A `Client` over any object with the four methods of vLLM's ``VLLMWeightSyncClient``.

    Its ``shutdown_weight_transfer_engine`` is called at the end where it has one. What pauses and
    resumes is not among the four: whoever made the object does that.

    Args:
        client: the object; it bounds its own calls.
        num_workers: as `Client` says.
    """

    def __init__(self, client: Any, *, num_workers: int = 0) -> None:
        self._client = client
        self.num_workers = num_workers
        self.name = str(getattr(client, "base_url", type(client).__name__))

    def init(self, init_info: Mapping[str, Any]) -> None:
        self._call("init_weight_transfer_engine", dict(init_info))

    def start(self) -> None:
        self._call("start_weight_update")

    def update(self, update_info: Mapping[str, Any]) -> None:
        self._call("update_weights", dict(update_info))

    def finish(self, weight_version: str | None = None) -> None:
        """Hands the version on where the object takes one: vLLM's own trainers give none."""
        given = [] if weight_version is None else [weight_version]
        self._call("finish_weight_update", *given[: self._num_accepted("finish_weight_update")])

    def pause(self, mode: PauseMode = "abort") -> None:
        self._refuse("pause")

    def resume(self) -> None:
        self._refuse("resume")

    def reset_prefix_cache(self) -> None:
        self._refuse("reset_prefix_cache")

    def shutdown(self) -> None:
        if hasattr(self._client, "shutdown_weight_transfer_engine"):
            self._call("shutdown_weight_transfer_engine")

    def close(self) -> None:
        """Nothing to release: the object is the caller's."""

    def _num_accepted(self, method: str) -> int:
        """1 where the method takes an argument, or does not tell; else 0."""
        try:
            inspect.signature(getattr(self._client, method)).bind("")
        except TypeError:
            return 0
        except (AttributeError, ValueError):
            pass
        return 1

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self._client, method)(*arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            response = getattr(error, "response", None)  # of requests' HTTPError, and of httpx's
            if said := getattr(response, "text", ""):
                text = f"{text}: {said}"
            status = getattr(response, "status_code", None)
            raise ClientError(
                f"{self.name}.{method}: {text}", server_text=said or text, status=status
            ) from error

    def _refuse(self, method: str) -> NoReturn:
        raise ClientError(
            f"{self.name} cannot {method}: it has the four weight calls of vLLM's protocol only; "
            "call the server itself, or give the trainer a client of rdt_trainer",
            server_text="",
        )
