"""A real ``vllm serve`` for tests and demonstrations: a process of its own, driven over HTTP.

Nothing of ours is on its command line but the backend's name: what `rdt-vllm` needs, the plugin
that vLLM finds by itself brings along.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psutil

from rdt_vllm.errors import RdtVllmError
from rdt_vllm.testing.serving import LeftoverProcessError, engine_environment

__all__ = ["HttpServer", "ServerStartError"]

START_SECONDS = 600.0
STOP_SECONDS = 90.0


class ServerStartError(RdtVllmError):
    """The server ended, or did not get ready; the message ends with what it last wrote."""


class HttpServer:
    """Starts at once; `wait` until it is ready, `close` it in the end. A context does both.

    Args:
        model: folder with ``config.json`` and weights.
        log: file that takes what the server writes.
        arguments: of its command line, which win over those of a tiny model without a tokenizer;
            None removes one, "" gives one without a value.
        environment: variables, which win too.

    Attributes:
        url: where it listens, on this machine only.
        model: its name in requests.
    """

    def __init__(
        self,
        model: Path | str,
        log: Path,
        arguments: Mapping[str, str | None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.model = str(model)
        self._log = log
        words = {
            "--model": self.model,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": "bfloat16",
            "--max-model-len": "64",
            "--max-num-seqs": "2",
            "--max-num-batched-tokens": "64",
            "--kv-cache-memory-bytes": str(64 << 20),
            "--weight-transfer-config": json.dumps({"backend": "rdt"}),
            "--enforce-eager": "",
            "--skip-tokenizer-init": "",
            "--no-enable-prefix-caching": "",
            **(arguments or {}),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in words.items():
            command += [name, value] if value else [] if value is None else [name]
        with engine_environment(), log.open("w") as output:
            added = {"VLLM_SERVER_DEV_MODE": "1", **(environment or {})}
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **added}
            )

    def wait(self, timeout_seconds: float = START_SECONDS) -> None:
        """Return once it answers; raises `ServerStartError`."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._failure(f"ended with status {self._process.returncode}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5.0):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise self._failure(f"did not answer within {timeout_seconds:g} seconds")

    def close(self) -> None:
        """End it, and wait until all of its processes have; idempotent.

        Raises:
            LeftoverProcessError: one did not end in time. It has been killed.
        """
        if self._process.poll() is not None:
            return
        root = psutil.Process(self._process.pid)
        processes = [root, *root.children(recursive=True)]
        self._process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=STOP_SECONDS)
        for process in alive:
            process.kill()
        self._process.wait()
        if alive:
            raise LeftoverProcessError(
                f"{len(alive)} processes of the server of {self.model} outlived its end and were "
                f"killed: {[process.pid for process in alive]}; did a worker hang?"
            )

    def __enter__(self) -> Self:
        try:
            self.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _failure(self, what: str) -> ServerStartError:
        return ServerStartError(
            f"the server of {self.model} {what}: {self._log.read_text()[-4000:]}"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
