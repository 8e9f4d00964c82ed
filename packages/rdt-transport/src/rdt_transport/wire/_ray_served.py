"""What a ray wire lets its peers read: an object for each set of regions that they asked for."""

from concurrent.futures import Future
from typing import Any

from rdt_transport.errors import WireError
from rdt_transport.wire._ray_direct import RayDirect, Shared
from rdt_transport.wire._ray_jobs import Jobs
from rdt_transport.wire._ray_line import OfficeLine
from rdt_transport.wire._ray_memory import PinnedMemory
from rdt_transport.wire.base import Region

__all__ = ["ServedObjects"]

_FORGET_EVERY = 1000


class ServedObjects:
    """Objects by (peer, the peer's number for it), kept until they are freed.

    Args:
        line: to the wire's own office, where peers find the answers.
    """

    def __init__(
        self, direct: RayDirect, memory: PinnedMemory, jobs: Jobs, line: OfficeLine
    ) -> None:
        self._direct = direct
        self._memory = memory
        self._jobs = jobs
        self._line = line
        self._objects: dict[tuple[str, int], Shared | None] = {}
        self._num_told = 0

    def ask(self, peer_name: str, number: int, regions: list[tuple[int, int, int]]) -> None:
        """Make an object of these regions and answer with its envelope, or why there is none."""
        try:
            views = [self._memory.view(Region(*each)) for each in regions]
        except WireError as error:
            self._line.post(peer_name, "refused", (number, str(error)))
            return
        key = peer_name, number
        self._objects[key] = None

        def answer(made: "Future[Shared]") -> None:
            if key not in self._objects:
                return  # freed meanwhile
            if (error := made.exception()) is not None:
                del self._objects[key]
                self._line.post(peer_name, "refused", (number, str(error)))
                return
            self._objects[key] = made.result()
            self._line.post(peer_name, "object", (number, [made.result()[1]]))

        self._jobs.run(lambda: self._direct.share(views), answer)

    def free(self, peer_name: str, number: Any) -> None:
        """That peer reads it no more."""
        self._objects.pop((peer_name, number), None)

    def leave(self, peer_name: str) -> None:
        """That peer reads nothing more."""
        self._objects = {key: held for key, held in self._objects.items() if key[0] != peer_name}

    def was_told(self) -> None:
        """A peer said something, perhaps of a read: what reads leave in this process is dropped at
        times, or it would be kept for ever."""
        self._num_told += 1
        if self._num_told % _FORGET_EVERY == 0:
            self._jobs.run(self._direct.forget_notifications)

    def clear(self) -> None:
        """Nobody reads anything any more."""
        self._objects.clear()
