"""A client of engines that live in Ray actors."""

import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from rdt_trainer.arguments import checked_seconds
from rdt_trainer.client import PauseMode, steps
from rdt_trainer.errors import ClientError, SettingsError
from rdt_transport.errors import RayMissingError
from rdt_transport.rendezvous import import_ray

__all__ = ["RayClient"]

_Call = tuple[str, list[Any]]
"""A method, and a reference to each handle's answer."""


class RayClient:
    """Drives the actors of one deployment (vLLM's ``LLM`` or ``AsyncLLM`` as actors) as one unit.

    Every call goes to all handles at once; the first error is raised without waiting for the
    rest. Requests travel as objects with an ``init_info`` or ``update_info`` attribute, which
    both engine classes accept. Ray must be initialised in this process.

    Args:
        handles: one actor handle, or those of one deployment.
        num_workers: as `Client` says.
        timeout_seconds: how long one call may take.

    Raises:
        SettingsError: no handle, no time, or Ray is missing or too old.
    """

    def __init__(
        self, handles: Any | Sequence[Any], *, num_workers: int = 0, timeout_seconds: float = 300.0
    ) -> None:
        self._handles = list(handles) if isinstance(handles, Sequence) else [handles]
        if not self._handles:
            raise SettingsError("RayClient got no actor handle: expected at least one")
        try:
            import_ray("RayClient")
        except RayMissingError as error:
            raise SettingsError(str(error)) from error
        self.num_workers = num_workers
        self._timeout_seconds = checked_seconds("timeout_seconds", timeout_seconds)
        self.name = ", ".join(str(handle) for handle in self._handles)

    def init(self, init_info: Mapping[str, Any]) -> None:
        self._call("init_weight_transfer_engine", SimpleNamespace(init_info=dict(init_info)))

    def start(self) -> None:
        self._call("start_weight_update")

    def update(self, update_info: Mapping[str, Any]) -> None:
        self._call("update_weights", SimpleNamespace(update_info=dict(update_info)))

    def submit(
        self, update_info: Mapping[str, Any], weight_version: str | None = None
    ) -> Iterator[str]:
        """`start`, `update` and `finish`, all on their way before any is awaited; see `Client`.

        Where the actors run one call at a time, in the order in which they come; an engine refuses
        an update or a finish after what failed before. Elsewhere one after the other.
        """
        if not self._is_ordered:
            return steps(self, update_info, weight_version)
        request = SimpleNamespace(update_info=dict(update_info))
        opening = [self._submit("start_weight_update"), self._submit("update_weights", request)]
        return self._awaited(opening, self._submit("finish_weight_update", weight_version))

    def _awaited(self, opening: Sequence[_Call], closing: _Call) -> Iterator[str]:
        yield "update"
        for call in opening:  # in order: what failed first is what is told
            self._answers(*call)
        yield "finish"
        self._answers(*closing)

    def finish(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def pause(self, mode: PauseMode = "abort") -> None:
        if self._has("pause_generation"):
            self._call("pause_generation", mode=mode)
        else:
            self._call("sleep", 0, mode)

    def is_paused(self) -> bool:
        """Whether an actor says so; vLLM's ``LLM`` does not tell."""
        return self._has("is_paused") and any(self._call("is_paused"))

    def resume(self) -> None:
        if self._has("resume_generation"):
            self._call("resume_generation")
        else:
            self._call("wake_up", ["scheduling"])

    def reset_prefix_cache(self) -> None:
        if False in self._call("reset_prefix_cache"):
            raise ClientError(
                f"{self.name}.reset_prefix_cache: an engine still holds cached blocks: expected "
                "no unfinished requests; pause with mode 'abort' or 'wait' first",
                server_text="False",
            )

    def shutdown(self) -> None:
        self._call("shutdown_weight_transfer_engine")

    def close(self) -> None:
        """Nothing to release: the actors are the caller's."""

    def _has(self, method: str) -> bool:
        return all(hasattr(handle, method) for handle in self._handles)

    @property
    def _is_ordered(self) -> bool:
        """Whether every actor runs its calls in order: it is neither async nor threaded."""
        known = [getattr(h, "_ray_allow_out_of_order_execution", None) for h in self._handles]
        return all(each is False for each in known)

    def _call(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """Every handle's answer, in the order of the handles."""
        return self._answers(*self._submit(method, *arguments, **options))

    def _submit(self, method: str, *arguments: Any, **options: Any) -> _Call:
        if not self._has(method):
            raise ClientError(
                f"{self.name} has no {method}: expected actors with the methods of vLLM's LLM or "
                "AsyncLLM 0.29 or later",
                server_text=f"no method {method}",
            )
        try:
            return method, [getattr(h, method).remote(*arguments, **options) for h in self._handles]
        except Exception as error:  # Ray itself is gone, say
            raise self._failed(method, error) from error

    def _answers(self, method: str, references: Sequence[Any]) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        deadline = time.monotonic() + self._timeout_seconds
        pending, answers = list(references), dict[Any, Any]()
        try:
            while pending:
                done = pending
                if len(pending) > 1:  # whoever is first: an error must not wait for the rest
                    left = deadline - time.monotonic()
                    done, _ = ray.wait(pending, num_returns=1, timeout=max(left, 0.0))
                if not done:
                    raise GetTimeoutError(f"{len(pending)} of {len(references)} did not answer")
                (first,) = done
                answers[first] = ray.get(first, timeout=max(deadline - time.monotonic(), 0.0))
                pending.remove(first)
            return [answers[each] for each in references]
        except RayTaskError as error:  # first: it is also whatever the actor raised
            raise self._failed(method, error.cause) from error
        except GetTimeoutError as error:
            raise ClientError(
                f"{self.name}.{method}: no answer within {self._timeout_seconds:g} seconds: "
                f"{error}; raise timeout_seconds if the engine is only slow",
                server_text=str(error),
            ) from error
        except RayError as error:
            raise self._failed(method, error) from error

    def _failed(self, method: str, error: BaseException) -> ClientError:
        text = f"{type(error).__name__}: {error}"
        return ClientError(f"{self.name}.{method}: {text}", server_text=text)
