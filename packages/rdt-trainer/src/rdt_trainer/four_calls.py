"""A client of vLLM's shape, as one of ours; vLLM itself is not imported."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
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
        given, named = ([], {}) if weight_version is None else self._as_taken(weight_version)
        self._call("finish_weight_update", *given, **named)

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

    def _as_taken(self, version: str) -> tuple[list[str], dict[str, str]]:
        """The version as an argument of ``finish_weight_update``, or none where that takes none."""
        named = {"weight_version": version}
        try:
            takes = inspect.signature(self._client.finish_weight_update).bind
        except (AttributeError, ValueError):  # it does not tell
            return [version], {}
        for arguments, options in (([version], {}), ([], named)):
            with suppress(TypeError):
                takes(*arguments, **options)
                return arguments, options
        return [], {}

    def _call(self, method: str, *arguments: Any, **options: Any) -> None:
        try:
            getattr(self._client, method)(*arguments, **options)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            said, status = _answer_of(error)
            if said:
                text = f"{text}: {said}"
            raise ClientError(
                f"{self.name}.{method}: {text}", server_text=said or text, status=status
            ) from error

    def _refuse(self, method: str) -> NoReturn:
        raise ClientError(
            f"{self.name} cannot {method}: it has the four weight calls of vLLM's protocol only; "
            "call the server itself, or give the trainer a client of rdt_trainer",
            server_text="",
        )


def _answer_of(error: Exception) -> tuple[str, int | None]:
    """The server's words and status, of requests' HTTPError and of httpx's; else nothing."""
    response = getattr(error, "response", None)
    try:
        text, status = getattr(response, "text", None), getattr(response, "status_code", None)
    except Exception:  # httpx's of an answer that was not read
        return "", None
    return text if isinstance(text, str) else "", status if isinstance(status, int) else None
