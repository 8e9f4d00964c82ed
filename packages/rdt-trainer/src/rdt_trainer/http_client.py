"""A client of ``vllm serve`` over its HTTP routes."""

import json
from collections.abc import Mapping
from typing import Any, Self

import httpx

from rdt_trainer.arguments import checked_seconds
from rdt_trainer.client import PauseMode
from rdt_trainer.errors import ClientError, SettingsError

__all__ = ["HttpClient"]

MAX_SERVER_TEXT_CHARS = 4000


class HttpClient:
    """Drives one ``vllm serve``; the server must run with ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        base_url: scheme, host and port, such as ``http://localhost:8000``.
        api_key: sent as a bearer token where the server wants one.
        num_workers: as `Client` says.
        timeout_seconds: how long the server may stay silent during a call. Its answers are short
            and come at once when a call ends, so this is how long the call itself may take.
        connect_timeout_seconds: how long the server may take to accept a connection.

    The server is asked directly, whatever proxy the environment names: its workers and this process
    reach each other without one, and the job's token is nobody else's.

    Raises `SettingsError` for a URL that is none, and for no time.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        num_workers: int = 0,
        timeout_seconds: float = 300.0,
        connect_timeout_seconds: float = 10.0,
    ) -> None:
        self.name = base_url.rstrip("/")
        self.num_workers = num_workers
        self._timeout_seconds = checked_seconds("timeout_seconds", timeout_seconds)
        self._connect_timeout_seconds = checked_seconds(
            "connect_timeout_seconds", connect_timeout_seconds
        )
        try:
            self._http = httpx.Client(
                base_url=self.name,
                headers={b"Authorization": f"Bearer {api_key}".encode()} if api_key else None,
                timeout=httpx.Timeout(timeout_seconds, connect=connect_timeout_seconds),
                transport=_direct_transport(),
            )
        except httpx.InvalidURL as error:
            raise SettingsError(f"{base_url}: {error}; expected http://host:port") from error

    def init(self, init_info: Mapping[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": dict(init_info)})

    def start(self) -> None:
        self._post("/start_weight_update")

    def update(self, update_info: Mapping[str, Any]) -> None:
        self._post("/update_weights", {"update_info": dict(update_info)})

    def finish(self, weight_version: str | None = None) -> None:
        body = None if weight_version is None else {"weight_version": weight_version}
        self._post("/finish_weight_update", body)

    def pause(self, mode: PauseMode = "abort") -> None:
        self._post("/pause", params={"mode": mode})

    def is_paused(self) -> bool:
        answer = self._ask("GET", "/is_paused")
        found = answer.get("is_paused") if isinstance(answer, dict) else None
        if not isinstance(found, bool):
            raise ClientError(
                f"GET {self.name}/is_paused: the answer is {answer!r}: expected is_paused, true or "
                "false; check that this is a vLLM server of version 0.29 or later",
                server_text=json.dumps(answer),
            )
        return found

    def resume(self) -> None:
        self._post("/resume")

    def reset_prefix_cache(self) -> None:
        answer = self._post("/reset_prefix_cache")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ClientError(
                f"{self.name}/reset_prefix_cache: the server still holds cached blocks: expected "
                "no running requests; pause with mode 'abort' or 'wait' first",
                server_text=json.dumps(answer),
            )

    def shutdown(self) -> None:
        self._post("/shutdown_weight_transfer_engine")

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _post(self, route: str, body: Any = None, params: Mapping[str, str] | None = None) -> Any:
        return self._ask("POST", route, body, params)

    def _ask(
        self, method: str, route: str, body: Any = None, params: Mapping[str, str] | None = None
    ) -> Any:
        where = f"{method} {self.name}{route}"
        if self._http.is_closed:
            raise ClientError(
                f"{where}: this client is closed: make a new one", server_text="closed"
            )
        try:
            response = self._http.request(method, route, json=body, params=params)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            late = isinstance(error, httpx.ConnectTimeout)
            within = f" within {self._connect_timeout_seconds:g} seconds" if late else ""
            raise ClientError(
                f"{where}: no connection{within} ({type(error).__name__}: {error}); check that the "
                "server is up and that this is its scheme, host and port",
                server_text=str(error),
            ) from error
        except httpx.TimeoutException as error:
            raise ClientError(
                f"{where}: the server was silent for {self._timeout_seconds:g} seconds "
                f"({type(error).__name__}); raise timeout_seconds if it is only slow",
                server_text=str(error),
            ) from error
        except httpx.HTTPError as error:
            raise ClientError(
                f"{where}: the connection broke: {type(error).__name__}: {error}; look into the "
                "server's log, and attach its workers again if it restarted",
                server_text=str(error),
            ) from error
        if response.is_success:
            return _json_or_none(response)
        text = _server_text(response)
        remedy = ""
        if response.status_code == httpx.codes.NOT_FOUND:
            remedy = "; the route exists only where the server runs with VLLM_SERVER_DEV_MODE=1"
        raise ClientError(
            f"{where}: HTTP {response.status_code}: {text}{remedy}",
            server_text=text,
            status=response.status_code,
        )


def _direct_transport() -> httpx.HTTPTransport:
    """One without a proxy, as it was given, and a connection a call.

    A server closes a connection that was idle for its few seconds, perhaps at the moment at which
    the next call is sent over it: it would fail, and with it the sync.
    """
    return httpx.HTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))


def _json_or_none(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _server_text(response: httpx.Response) -> str:
    """The error's own words, from each of the bodies a server answers with."""
    body = _json_or_none(response)
    found: Any = body
    if isinstance(body, dict):
        found = body.get("error", body.get("detail", body))
        if isinstance(found, dict):
            found = found.get("message", found)
    if found is None:
        found = response.text or response.reason_phrase
    text = found if isinstance(found, str) else json.dumps(found)
    half = MAX_SERVER_TEXT_CHARS // 2  # what went wrong comes first, and where last
    return text if len(text) <= 2 * half else f"{text[:half]} [...] {text[-half:]}"
