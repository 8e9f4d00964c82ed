"""The head of Ray dies, and the job's rendezvous with it, while an engine without Ray is synced."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rdt_trainer import LocalClient, ModuleSource, RdtTrainer, SyncFailedError
from rdt_transport.errors import RdtTransportError
from rdt_transport.rendezvous import JobSettings, RendezvousAddress
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from rdt_vllm.testing.report import DEFAULT_PROMPT, ask, check_exact, greedy_tokens, observe
from rdt_vllm.testing.serving import EngineCache
from rdt_vllm.testing.tiny_models import TINY_QWEN3, draw_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SETTINGS = JobSettings(num_producers=1, max_chunk_bytes=16 << 10)
TIMEOUT_SECONDS = 120.0  # of waits that must end before

# A driver with a Ray of its own, in whose actor the rendezvous is.
DRIVER = """
import json, sys
import ray
from rdt_transport.rendezvous import JobSettings, host_in_ray
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
host = host_in_ray("job", "token", JobSettings.from_json(json.loads(sys.argv[1])))
print(host.address.host, host.address.port, flush=True)
sys.stdin.read()
"""


class PrivateRay:
    """Ray's processes below a driver of their own; this process never attaches to them."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", DRIVER, json.dumps(SETTINGS.to_json())]
        self._driver = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._driver.stdout is not None
        host, port = self._driver.stdout.readline().decode().split()
        self.address = RendezvousAddress(host, int(port), "job", "token")

    def kill_head(self) -> None:
        """The node with the head is gone, and with it the actor that lives there."""
        processes = psutil.Process(self._driver.pid).children(recursive=True)
        assert [each for each in processes if each.name() == "gcs_server"]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=60)

    def close(self) -> None:
        processes = psutil.Process(self._driver.pid).children(recursive=True)
        self._driver.kill()
        self._driver.communicate()
        for process in processes:
            if process.is_running():
                process.kill()
        psutil.wait_procs(processes, timeout=60)


@contextmanager
def private_ray() -> Iterator[PrivateRay]:
    ray = PrivateRay()
    try:
        yield ray
    finally:
        ray.close()


class DoomedSource(ModuleSource):
    """Kills the head of ``ray`` before it yields ``name``."""

    ray: PrivateRay
    name: str

    def iter_full(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in super().iter_full():
            if name == self.name:
                self.ray.kill_head()
            yield name, tensor


@pytest.mark.parametrize(
    ("name", "torn"),
    [("model.embed_tokens.weight", False), ("model.norm.weight", True)],
    ids=["before anything is read", "in the midst of it"],
)
def test_the_servers_serve_on_and_the_next_job_heals_them(
    engines: EngineCache, tmp_path: Path, name: str, torn: bool
) -> None:
    model = TINY_QWEN3.build(seed=1)
    llm: Any = engines.get(write_checkpoint(model, engines.folder / "qwen3"), 1)
    with private_ray() as ray:
        # Its groups take credit, so the last one is gathered when the worker has read the first.
        source = DoomedSource(model, stable=False)
        source.ray, source.name = ray, name
        trainer = RdtTrainer(
            source,
            LocalClient(llm),
            settings=SETTINGS,
            rendezvous=ray.address,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        with trainer:
            trainer.init()
            for _ in range(2):  # nor does it come back
                with pytest.raises(SyncFailedError, match=r"rendezvous .*make a new trainer") as e:
                    trainer.send_weights()
                assert isinstance(e.value.__cause__, RdtTransportError)
                assert "waited" not in str(e.value)
                source.name = ""
        assert greedy_tokens(llm, DEFAULT_PROMPT, 2)
        assert ask(llm, "rdt_torn") == [torn]

    draw_weights(model, 71)
    sent = write_weights(ModuleSource(model).iter_full(), tmp_path / "sent")
    with RdtTrainer(ModuleSource(model), LocalClient(llm), timeout_seconds=60) as healer:
        healer.init()
        observe(llm)
        healer.send_weights()
        check_exact(llm, sent).require()
    assert ask(llm, "rdt_torn") == [False]
