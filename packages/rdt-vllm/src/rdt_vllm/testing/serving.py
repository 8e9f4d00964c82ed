"""A real vLLM for tests and demonstrations, started as fast as it starts and ended whole.

Nearly all of a start is Python importing vLLM, in the caller, the engine's process and every
worker. So engines are worth sharing: `EngineCache` keeps the last few alive.
"""

import contextlib
import importlib
import os
from collections import OrderedDict
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psutil

from rdt_vllm.errors import RdtVllmError
from rdt_vllm.testing.report import PROBE

if TYPE_CHECKING:
    from vllm import LLM

__all__ = [
    "EngineCache",
    "LeftoverProcessError",
    "engine_arguments",
    "engine_environment",
    "import_apart",
    "kill_engine",
    "serving",
    "start_engine",
    "stop_engine",
]

_MIB = 1 << 20


class LeftoverProcessError(RdtVllmError):
    """An engine's process outlived its shutdown."""


def engine_arguments(
    model: Path | str, tensor_parallel_size: int = 1, **overrides: Any
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for a tiny model without a tokenizer, with the probe and ``rdt``.

    Eager and without prefix caching, as an exactness check needs it; small batches, a small
    key-value cache and no warm-up, for the start's sake.

    Args:
        model: folder with ``config.json`` and weights, or only the former with
            ``load_format="dummy"``.
        tensor_parallel_size: workers of the engine.
        overrides: further arguments, which win; None removes one.
    """
    arguments = {
        "model": str(model),
        "tensor_parallel_size": tensor_parallel_size,
        "distributed_executor_backend": "mp",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 64 * _MIB,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": "rdt"},
        "worker_extension_cls": PROBE,
        **overrides,
    }
    return {name: value for name, value in arguments.items() if value is not None}


@contextlib.contextmanager
def engine_environment(tensor_parallel_size: int = 1) -> Generator[None]:
    """Variables an engine reads when it starts; what the caller has set wins. Restored at the end.

    Each worker gets cores of its own: workers that share cores spin against each other.
    """
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": _cores(tensor_parallel_size),
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Killed workers leave shared memory behind, and on a busy machine the default 5 s kill.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "60",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _cores(num_workers: int) -> str:
    """vLLM's spelling of "this many equal shares of the cores we may use", as ``0,1|2,3``."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // num_workers)
    parts = [cores[i * share : (i + 1) * share] or cores[-1:] for i in range(num_workers)]
    return "|".join(",".join(map(str, part)) for part in parts)


def start_engine(model: Path | str, tensor_parallel_size: int = 1, **overrides: Any) -> "LLM":
    """Start ``vllm.LLM``; arguments as for `engine_arguments`. End it with `stop_engine`."""
    with engine_environment(tensor_parallel_size):
        vllm = import_apart("vllm.entrypoints.llm")
        return vllm.LLM(**engine_arguments(model, tensor_parallel_size, **overrides))


def import_apart(name: str) -> ModuleType:
    """Import a module on a thread of its own, which none of the caller's frames is below.

    Importing vLLM meets packages that are absent, and keeps those errors for ever: with their
    tracebacks the frames, and so whatever the callers' variables hold later, an engine say.
    """
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(importlib.import_module, name).result()


def stop_engine(llm: "LLM", timeout_seconds: float = 90.0) -> None:
    """Shut the engine down and wait until all of its processes have ended; safe to call again.

    Raises:
        LeftoverProcessError: one outlived the shutdown by ten seconds. It has been killed.
    """
    processes = _processes(llm)
    # Left to itself, vLLM gives the engine's process 5 s, less than its workers may take.
    core = llm.llm_engine.engine_core
    core.shutdown(timeout=timeout_seconds)
    if hasattr(core, "engine_core"):  # its worker is this process, and its group listens on a port
        from rdt_vllm.testing import _vllm

        _vllm.destroy_model_parallel()
        _vllm.destroy_distributed_environment()
    _, alive = psutil.wait_procs(processes, timeout=10.0)
    for process in alive:
        process.kill()
    if alive:
        raise LeftoverProcessError(
            f"{len(alive)} processes of an engine outlived its shutdown and were killed: "
            f"{[process.pid for process in alive]}; did a worker hang?"
        )


def kill_engine(llm: "LLM") -> None:
    """Kill the engine's process and its workers at once, as a machine's death would.

    Their shared memory goes too, which Python frees only when this process ends. What is left of
    the engine in this process is to be ended by `stop_engine`.
    """
    # The tracker of shared memory is everybody's.
    doomed = [p for p in _processes(llm) if "resource_tracker" not in " ".join(p.cmdline())]
    mapped = {each.path for process in doomed for each in process.memory_maps()}
    for process in doomed:
        process.kill()
    psutil.wait_procs(doomed, timeout=10.0)
    for path in mapped:
        if path.startswith("/dev/shm/"):
            Path(path).unlink(missing_ok=True)


def _processes(llm: "LLM") -> list[psutil.Process]:
    """The engine's process, where it has one, with everything below it."""
    resources = getattr(llm.llm_engine.engine_core, "resources", None)
    manager = getattr(resources, "engine_manager", None)
    return _trees([process.pid for process in getattr(manager, "processes", ())])


def _trees(roots: Iterable[int | None]) -> list[psutil.Process]:
    """The running processes among ``roots``, with everything below them."""
    found = []
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(root)
            found += [process, *process.children(recursive=True)]
    return found


@contextlib.contextmanager
def serving(model: Path | str, tensor_parallel_size: int = 1, **overrides: Any) -> Generator["LLM"]:
    """An engine for the length of a ``with`` block; arguments as for `engine_arguments`."""
    llm = start_engine(model, tensor_parallel_size, **overrides)
    try:
        yield llm
    finally:
        stop_engine(llm)


class EngineCache:
    """Engines that several tests share, one for each set of arguments. One thread uses it.

    Args:
        folder: free for what the engines are started from; the cache itself writes nothing.
        max_engines: how many may live at once; the one unused for longest is stopped for another.
    """

    def __init__(self, folder: Path, max_engines: int = 2) -> None:
        self.folder = folder
        self._max_engines = max_engines
        self._engines: OrderedDict[str, LLM] = OrderedDict()

    def get(self, model: Path | str, tensor_parallel_size: int = 1, **overrides: Any) -> "LLM":
        """The engine for these `engine_arguments`, started unless it is there.

        It serves whatever its last user left in it.
        """
        arguments = engine_arguments(model, tensor_parallel_size, **overrides)
        key = repr(sorted(arguments.items()))
        if key not in self._engines:
            while len(self._engines) >= self._max_engines:
                stop_engine(self._engines.popitem(last=False)[1])
            self._engines[key] = start_engine(model, tensor_parallel_size, **overrides)
        self._engines.move_to_end(key)
        return self._engines[key]

    def discard(self, llm: "LLM") -> None:
        """Stop an engine that nobody should get again: a test broke it."""
        for key, kept in list(self._engines.items()):
            if kept is llm:
                stop_engine(self._engines.pop(key))

    def close(self) -> None:
        """Stop all of them, also when stopping one raises."""
        with contextlib.ExitStack() as stack:
            for llm in self._engines.values():
                stack.callback(stop_engine, llm)
            self._engines.clear()
