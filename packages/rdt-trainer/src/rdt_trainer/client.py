"""The client: what a trainer asks of an inference server, however it reaches it."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

__all__ = ["Client", "PauseMode", "declared_workers", "steps"]

PauseMode = Literal["abort", "wait", "keep"]


class Client(Protocol):
    """One inference deployment; every method blocks, and raises `ClientError`.

    `RdtTrainer` calls ``init`` to attach and to attach again, for every sync ``start``, ``update``
    and ``finish`` in this order, and at its end ``shutdown``: from background threads, one call
    after another, never two at once. After a call that failed or never arrived the next is again
    ``init``, ``start`` or ``shutdown``; ``start`` gives up an update that is still open.

    A client may have ``submit(update_info, weight_version)``, which is called instead of the three,
    on the thread that calls `RdtTrainer.send_weights`: for one that need not wait for a call before
    it makes the next. It returns at once what `steps` does, which a background thread iterates;
    where a call fails, what was made after it must change nothing.

    A client may have ``num_workers``: how many workers its deployment has, which each is told and
    `RdtTrainer.init` checks; 0, as without it, lets them infer it.

    A client may have ``is_paused()``, whether its deployment is. A push that fails leaves paused
    what was paused before it came; without the method, it takes a deployment for one that was not.
    """

    @property
    def name(self) -> str:
        """What messages call this deployment."""
        ...

    def init(self, init_info: Mapping[str, Any]) -> None:
        """Attach the deployment's workers to the job that ``init_info`` describes."""
        ...

    def start(self) -> None:
        """Open a weight update."""
        ...

    def update(self, update_info: Mapping[str, Any]) -> None:
        """Receive the epoch that ``update_info`` names."""
        ...

    def finish(self, weight_version: str | None = None) -> None:
        """Return once the new weights are in place and serving may resume."""
        ...

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop scheduling; requests in flight are aborted, awaited or kept for ``resume``."""
        ...

    def resume(self) -> None:
        """Schedule again."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget cached activations of older weights."""
        ...

    def shutdown(self) -> None:
        """Detach the workers from the job; serving goes on with the weights they have."""
        ...

    def close(self) -> None:
        """Release this client's own resources; idempotent."""
        ...


def declared_workers(client: Client) -> int:
    """How many workers the client says its deployment has; 0 where it does not say."""
    return getattr(client, "num_workers", 0)


def steps(
    client: Client, update_info: Mapping[str, Any], weight_version: str | None
) -> Iterator[str]:
    """Take the client through one update: the name of each call, yielded before it is awaited."""
    yield "start"
    client.start()
    yield "update"
    client.update(update_info)
    yield "finish"
    client.finish(weight_version)
