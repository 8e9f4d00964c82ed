"""vLLM in this process without an engine: a configuration, and a world of one worker on the CPU."""

import contextlib
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

from rdt_vllm._vllm import VllmConfig, active_config
from rdt_vllm.testing import _vllm
from rdt_vllm.testing.serving import engine_arguments, engine_environment

__all__ = ["single_worker", "worker_config"]


def worker_config(folder: Path | str, **overrides: Any) -> VllmConfig:
    """What an engine started with `engine_arguments` of these would give its worker."""
    arguments = engine_arguments(folder, distributed_executor_backend="uni", **overrides)
    with engine_environment():
        return _vllm.EngineArgs(**arguments).create_engine_config()


@contextlib.contextmanager
def single_worker(folder: Path | str, **overrides: Any) -> Generator[VllmConfig]:
    """A configuration under which models can be built, as `rdt_vllm.testing.fresh_model` does.

    vLLM's process groups are global: one context at a time in a process.
    """
    config = worker_config(folder, **overrides)
    with active_config(config):
        _vllm.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{_free_port()}", 0, "gloo")
        _vllm.ensure_model_parallel_initialized(1, 1)
    try:
        yield config
    finally:
        _vllm.destroy_model_parallel()
        _vllm.destroy_distributed_environment()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
