"""The NIXL agent: the only file that imports nixl, and the seam where its errors become ours.

Importing this module imports nothing of NIXL and sets nothing. Making a `NixlAgent` does both: it
sets those of `ENVIRONMENT_DEFAULTS` that the user left unset, and then imports NIXL, because NIXL
reads its variables once, and UCX its own when it is loaded or an agent is made.
"""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any, Literal

from rdt_transport.errors import NixlMissingError, PeerLostError, WireError

__all__ = [
    "ENVIRONMENT_DEFAULTS",
    "SPLIT_REGIONS",
    "MemoryKind",
    "NixlAgent",
    "Span",
    "posting_threads",
    "sleeping_progress",
]

MemoryKind = Literal["DRAM", "VRAM"]
Span = tuple[int, int, int]
"""Absolute address, bytes, device ordinal."""

ENVIRONMENT_DEFAULTS = {
    # NIXL's default level writes several lines for every agent.
    "NIXL_LOG_LEVEL": "WARN",
    # Without it a read between two GPUs of one node without NVLink falls back to TCP, silently.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y",
    # UCX takes SIGHUP, as it is loaded, for a switch to debug output: a process that is hung up,
    # or handles it, would go on and write pages.
    "UCX_DEBUG_SIGNO": "0",
}
"""Environment variables set when an agent is made, each only where the user has not set it; those
of CUDA only where there is a GPU, since UCX warns of settings that nothing reads."""

SPLIT_REGIONS = 32
"""Regions from which on a read is split over posting threads: handing the shares out costs tens of
microseconds, and a region of a GPU's memory takes several to post."""

POSTING_THREADS = 4
_NVIDIA_DRIVER_PATHS = ("/dev/nvidiactl", "/dev/dxg")
_MINIMUM_VERSION = (1, 5)
_PROGRESS_MICROSECONDS = 1000  # between looks at what wakes nobody; events end the wait at once
_REMEDY = "install it with: pip install 'nixl>=1.5,<2'"


def posting_threads(device_type: str) -> int:
    """How many threads should post reads into memory of this type ("cpu", "cuda").

    `POSTING_THREADS` for a GPU, if this process may run on as many cores; none for the host, where
    a read is a copy that one core makes as well as several.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    on_gpu = device_type == "cuda"
    return POSTING_THREADS if on_gpu and (cores or 1) >= POSTING_THREADS else 0


def _import_nixl() -> Any:
    """NIXL's Python API module; raises `NixlMissingError` when it is absent or too old."""
    try:
        version = importlib.metadata.version("nixl")
        api = importlib.import_module("nixl._api")
    except (ImportError, OSError) as error:  # PackageNotFoundError is an ImportError
        raise NixlMissingError(f"the nixl wire needs NIXL: {error}; {_REMEDY}") from error
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < _MINIMUM_VERSION:
        raise NixlMissingError(f"the nixl wire needs NIXL 1.5 or newer, found {version}; {_REMEDY}")
    return api


def _set_environment_defaults() -> None:
    has_gpu = any(os.path.exists(path) for path in _NVIDIA_DRIVER_PATHS)
    for variable, value in ENVIRONMENT_DEFAULTS.items():
        if has_gpu or "CUDA" not in variable:
            os.environ.setdefault(variable, value)


def _pool(num_threads: int) -> dict[str, str]:
    """NIXL's parameters of a pool of posting threads."""
    if num_threads == 0:
        return {}
    return {"num_threads": str(num_threads), "split_batch_size": str(SPLIT_REGIONS)}


@contextmanager
def sleeping_progress() -> Generator[None]:
    """Agents that others make meanwhile have progress threads that wait, instead of spinning.

    NIXL's bindings have the delay, its Python API fixes it at none. Not for two threads at once.
    """
    _set_environment_defaults()
    module = sys.modules[_import_nixl().nixl_agent.__module__]
    bindings = module.nixlBind

    class Config(bindings.nixlAgentConfig):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _PROGRESS_MICROSECONDS if name == "pthrDelay" else value)

    vars(module)["nixlBind"] = SimpleNamespace(**{**vars(bindings), "nixlAgentConfig": Config})
    try:
        yield
    finally:
        vars(module)["nixlBind"] = bindings


class _Translated:
    """Raises NIXL's errors as ours; a class, since a generator would double the cost of a poll."""

    __slots__ = ("_doing", "_errors", "_lost")

    def __init__(
        self, errors: tuple[type[Exception], ...], lost: type[Exception], doing: str
    ) -> None:
        self._errors = errors
        self._lost = lost
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, self._errors):
            message = f"{self._doing}: {type(error).__name__}: {error}"
            ours = PeerLostError if isinstance(error, self._lost) else WireError
            raise ours(message) from error


class NixlAgent:
    """One NIXL agent without a progress thread; belongs to the thread that made it.

    Nothing moves unless a method here is called: `finished` and `notifications` drive it. Every
    error of NIXL is raised as `WireError`, or as `PeerLostError` when the peer is gone, with NIXL's
    own as ``__cause__``.

    Args:
        name: unique for this incarnation; peers see it as the sender of notifications.
        backend: the NIXL plugin that moves the bytes.
        num_threads: that post the regions of a read of `SPLIT_REGIONS` or more, each a share, and
            poll until they have landed; they sleep otherwise. 0: the calling thread posts all.
    """

    def __init__(self, name: str, backend: str = "UCX", num_threads: int = 0) -> None:
        _set_environment_defaults()
        api = _import_nixl()
        bindings = api.nixlBind
        self._errors = tuple(
            kind
            for kind in vars(bindings).values()
            if isinstance(kind, type) and issubclass(kind, Exception)
        )
        self._lost = bindings.nixlRemoteDisconnectError
        # NIXL's own progress thread spins on a whole core, so every side polls for itself.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        with self._translated(f"making agent {name}"):
            self._agent: Any = api.nixl_agent(name, config)
            if backend not in self._agent.get_plugin_list():
                raise WireError(
                    f"NIXL has no plugin {backend}, only {self._agent.get_plugin_list()}; "
                    "install a NIXL build that ships it"
                )
            self._agent.create_backend(backend, _pool(num_threads))
        self.name = name

    def _translated(self, doing: str) -> "_Translated":
        return _Translated(self._errors, self._lost, doing)

    def register(self, spans: Sequence[Span], memory: MemoryKind) -> object:
        """Register memory; the result is what `deregister` takes."""
        rows = [(address, num_bytes, device, "") for address, num_bytes, device in spans]
        # NIXL cannot register what an allocator with expandable segments gave out.
        remedy = ", which must not come from expandable segments" if memory == "VRAM" else ""
        with self._translated(f"{self.name} registering {len(rows)} ranges of {memory}{remedy}"):
            return self._agent.register_memory(rows, memory)

    def deregister(self, registration: object) -> None:
        """Undo one `register`."""
        with self._translated(f"{self.name} deregistering memory"):
            self._agent.deregister_memory(registration)

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent and what is registered now."""
        with self._translated(f"{self.name} reading its own metadata"):
            return self._agent.get_agent_metadata()

    def add_peer(self, peer: str, metadata: bytes) -> str:
        """Learn ``peer``, or more of it; handles stay valid. Returns the name in the metadata."""
        with self._translated(f"{self.name} loading the metadata of {peer}"):
            name = self._agent.add_remote_agent(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else name

    def remove_peer(self, peer: str) -> None:
        """Forget a peer and disconnect; handles and descriptor lists of it become invalid."""
        with self._translated(f"{self.name} removing peer {peer}"):
            self._agent.remove_remote_agent(peer)

    def prepare(self, peer: str | None, spans: Sequence[Span], memory: MemoryKind) -> Any:
        """A prepared descriptor list of some regions, of ``peer`` or (None) of our own."""
        owner = "NIXL_INIT_AGENT" if peer is None else peer
        what = f"{len(spans)} regions of {peer or 'its own'}"
        with self._translated(f"{self.name} preparing {what}"):
            return self._agent.prep_xfer_dlist(owner, list(spans), memory)

    def make_read(self, peer: str, local: Any, remote: Any, count: int) -> Any:
        """A transfer handle that reads all ``count`` regions of ``remote`` into those of ``local``,
        in pairs; reusable after it finished."""
        indices = list(range(count))
        with self._translated(f"{self.name} preparing a read from {peer}"):
            return self._agent.make_prepped_xfer("READ", local, indices, remote, indices)

    def post(self, peer: str, transfer: Any, notification: bytes) -> bool:
        """Start a transfer; True when it has finished already.

        NIXL keeps the notification of a handle until another replaces it: once a handle was posted
        with one, an empty one would send the old one again.
        """
        with self._translated(f"{self.name} posting a read from {peer}"):
            return self._agent.transfer(transfer, notification) == "DONE"

    def finished(self, peer: str, transfer: Any) -> bool:
        """Whether a started transfer has finished; raises when it failed."""
        with self._translated(f"{self.name} reading from {peer}"):
            return self._agent.check_xfer_state(transfer) == "DONE"

    def release(self, prepared: Any) -> None:
        """Give back a transfer handle or a descriptor list; an active transfer is cancelled."""
        with self._translated(f"{self.name} releasing a handle"):
            prepared.release()

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification."""
        with self._translated(f"{self.name} notifying {peer}"):
            self._agent.send_notif(peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """(sender, message) of everything that arrived, each sender's messages in order."""
        with self._translated(f"{self.name} polling"):
            arrived = self._agent.get_new_notifs()
        return [(sender, message) for sender, batch in arrived.items() for message in batch]

    def close(self) -> None:
        """Drop the agent; everything made from it must have been given back."""
        self._agent = None
