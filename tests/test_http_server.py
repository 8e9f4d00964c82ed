"""A stock server, started from the command line and driven over HTTP, follows a trainer."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rdt_trainer import ClientError, HttpClient, ModuleSource, RdtTrainer
from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.serving import engine_environment
from rdt_vllm.testing.tiny_models import TINY_QWEN3, draw_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = [1, 2, 3, 5, 8, 13]
START_SECONDS = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(folder: Path, log: Path) -> Iterator[str]:
    """``vllm serve`` with nothing of ours on its command line but the backend's name."""
    port = free_port()
    arguments = {
        "--model": str(folder),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "bfloat16",
        "--max-model-len": "64",
        "--max-num-seqs": "2",
        "--max-num-batched-tokens": "64",
        "--kv-cache-memory-bytes": str(64 << 20),
        "--weight-transfer-config": json.dumps({"backend": "rdt"}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [word for pair in arguments.items() for word in pair]
    command += ["--enforce-eager", "--skip-tokenizer-init", "--no-enable-prefix-caching"]
    with engine_environment(1), log.open("w") as output:
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process, log)
        yield url
    finally:
        process.terminate()
        assert process.wait(60) is not None


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"no answer within {START_SECONDS} s: {log.read_text()[-4000:]}")


def complete(url: str, model: Path) -> list[int]:
    body = {
        "model": str(model),
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


def test_completions_follow_the_trainer(tmp_path: Path) -> None:
    model = TINY_QWEN3.build(seed=1)
    folder = write_checkpoint(model, tmp_path / "served")
    with server(folder, tmp_path / "server.log") as url:
        first = complete(url, folder)
        client = HttpClient(url, timeout_seconds=120)
        with pytest.raises(ClientError, match="init_weight_transfer_engine has not succeeded"):
            client.start()
        with RdtTrainer(ModuleSource(model), client) as trainer:
            trainer.init()
            trainer.send_weights()
            assert complete(url, folder) == first  # the weights it was started with
            draw_weights(model, 2)
            trainer.send_weights("step-2")
            second = complete(url, folder)
            assert second != first
            version = httpx.get(f"{url}/weight_info", timeout=10)
            draw_weights(model, 1)
            trainer.send_weights()
            assert complete(url, folder) == first
        assert complete(url, folder) == first  # goes on serving without the trainer
        assert version.json() == {"weight_version": "step-2"}
