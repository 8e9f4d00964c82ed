"""Pushing a checkpoint, over real reads, into deployments that need no inference engine."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rdt_trainer import ClientError, SourceError
from rdt_trainer.push import PushOptions, PushOutcome, ServerOutcome, Stage, push
from rdt_trainer.push.command import main
from rdt_trainer.push.server import PushedServer
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.checksums import region_checksum, split_checksums
from rdt_transport.wire.nixl import NixlWire

OPTIONS = PushOptions("v7", timeout_seconds=20.0)
PUSHED = ["init", "pause", "start", "update", "finish", "reset_prefix_cache", "resume", "shutdown"]


class Engine(TorchEngineClient):
    """Remembers what it is told, and fails a call on demand, as a server does: with its words."""

    def __init__(self, num_workers: int = 1, fails: str = "", name: str = "http://engine") -> None:
        super().__init__(NixlWire, num_workers=num_workers)
        self.name = name
        self.update_infos: list[Mapping[str, Any]] = []
        self._fails = fails

    def _check(self, call: str) -> None:
        if call == self._fails:
            self.calls.append(call)
            raise ClientError(f"{self.name}/{call}: HTTP 500: no", server_text="no", status=500)

    def init(self, init_info: Mapping[str, Any]) -> None:
        self._check("init")
        super().init(init_info)

    def pause(self, mode: Any = "abort") -> None:
        self._check("pause")
        super().pause(mode)

    def start(self) -> None:
        self._check("start")
        super().start()

    def update(self, update_info: Mapping[str, Any]) -> None:
        self.update_infos.append(update_info)
        super().update(update_info)

    def finish(self, weight_version: str | None = None) -> None:
        self._check("finish")
        super().finish(weight_version)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-7"
    folder.mkdir()
    generator = torch.Generator().manual_seed(7)
    names = ["model.embed.weight", "model.layers.0.w", "model.layers.1.w", "model.norm.weight"]
    weights = {name: torch.randn(6, 8, generator=generator).bfloat16() for name in names}
    save_file(weights, folder / "model.safetensors")
    return folder


def has(engine: TorchEngineClient, checkpoint: Path) -> bool:
    weights = load_file(checkpoint / "model.safetensors")
    return all(
        torch.equal(found[name], engine.shard(worker, tensor))
        for name, tensor in weights.items()
        for worker, found in enumerate(engine.workers)
    )


@pytest.mark.parametrize("staged", [False, True])
def test_every_server_gets_the_checkpoint_and_serves_on(checkpoint: Path, staged: bool) -> None:
    engines = [Engine(num_workers=2), Engine()]
    stages: list[tuple[Stage, Any, int]] = []
    options = PushOptions("v7", timeout_seconds=20.0, staged=staged)
    outcome = push(checkpoint, engines, options, lambda *stage: stages.append(stage))  # type: ignore[arg-type]

    assert outcome.exit_status == 0
    assert [server.failure for server in outcome.servers] == [None, None]
    assert not any(server.is_paused for server in outcome.servers)
    for engine in engines:
        assert has(engine, checkpoint)
        assert engine.weight_version == "v7"
        assert engine.calls == PUSHED
    reads = [read for server in outcome.servers for read in server.workers]
    assert [(read.worker, read.owner) for read in reads] == [(0, 0), (1, 0), (0, 0)]
    assert sum(read.bytes_direct for read in reads) == (0 if staged else 2 * outcome.num_bytes)
    assert sum(read.bytes_staged for read in reads) == (2 * outcome.num_bytes if staged else 0)
    assert [stage for stage, _, _ in stages] == [Stage.ATTACH, Stage.PUSH]
    _, done, total = stages[-1]
    assert done() == total == 2 * outcome.num_bytes


def test_a_dry_run_tells_the_plan_and_touches_nothing(checkpoint: Path) -> None:
    engine = Engine(num_workers=2)
    before = push(checkpoint, [engine], PushOptions("v7", dry_run=True, timeout_seconds=20.0))
    assert engine.calls == ["init", "shutdown"]
    assert not has(engine, checkpoint)
    after = push(checkpoint, [engine], OPTIONS)
    assert before.servers == after.servers
    assert [read.num_tensors for read in before.servers[0].workers] == [4, 4]
    assert json.loads(json.dumps(before.to_json()))["exit_status"] == 0


@pytest.mark.parametrize(
    ("fails", "is_paused"), [("pause", False), ("start", False), ("finish", True)]
)
def test_a_server_that_fails_is_told_and_serves_on_only_if_untouched(
    checkpoint: Path, fails: str, is_paused: bool
) -> None:
    good, bad = Engine(), Engine(fails=fails, name="http://bad")
    outcome = push(checkpoint, [good, bad], OPTIONS)
    assert outcome.exit_status == 1
    assert outcome.servers[0].failure is None
    assert has(good, checkpoint)
    assert f"http://bad/{fails}: HTTP 500: no" in (outcome.servers[1].failure or "")
    assert outcome.servers[1].is_paused is is_paused
    assert ("resume" in bad.calls) is not is_paused

    outcome = push(checkpoint, [bad], OPTIONS)
    assert outcome.exit_status == 3
    assert f"http://bad/{fails}: HTTP 500: no" in (outcome.servers[0].failure or "")


def test_a_server_that_cannot_attach_stops_the_push_before_anybody_pauses(
    checkpoint: Path,
) -> None:
    good, bad = Engine(), Engine(fails="init", name="http://bad")
    with pytest.raises(ClientError, match="http://bad/init: HTTP 500: no"):
        push(checkpoint, [good, bad], OPTIONS)
    assert "pause" not in good.calls + bad.calls
    assert not has(good, checkpoint)


def test_a_tensor_that_no_worker_reads_stops_it_too_unless_allowed(checkpoint: Path) -> None:
    engine = TorchEngineClient(NixlWire, ignores=["model.norm.weight"])
    with pytest.raises(SourceError, match=r"model\.norm\.weight"):
        push(checkpoint, [engine], OPTIONS)
    assert engine.calls == ["init", "shutdown"]
    allowed = PushOptions("v7", timeout_seconds=20.0, unconsumed=["*.norm.*"])
    assert push(checkpoint, [engine], allowed).exit_status == 0


def test_a_pause_that_ends_too_late_begins_no_update() -> None:
    engine = Engine()
    server = PushedServer(engine, "wait")
    server.recover()
    with pytest.raises(ClientError, match="given up before it was paused"):
        server.start()
    assert engine.calls == ["pause", "resume"]


def test_to_verify_is_to_send_what_each_worker_should_find(checkpoint: Path) -> None:
    engines = [Engine(num_workers=2), Engine()]
    outcome = push(checkpoint, engines, PushOptions("v7", verify=True, timeout_seconds=20.0))
    assert outcome.is_verified
    for engine in engines:
        (info,) = engine.update_infos
        key = bytes.fromhex(info["checksums"]["key"])
        assert info["checksums"]["workers"].keys() == {str(w) for w in range(len(engine.workers))}
        for worker, by_owner in info["checksums"]["workers"].items():
            held = engine.workers[int(worker)]
            expected = [region_checksum(tensor, key) for tensor in held.values()]
            assert sorted(split_checksums("".join(by_owner["0"]))) == sorted(expected)


def test_the_command_neither_needs_nor_imports_ray_or_a_trainer() -> None:
    code = (
        "import sys; import rdt_trainer.push.command; "
        "print(sorted({'ray', 'vllm', 'transformers'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--url", "nowhere"], 2, "expected http://host:port"),
        (["--url", "http://127.0.0.1:9", "--pause-mode", "keep"], 2, "keep"),
        ([], 2, "--url"),
        (["--url", "http://127.0.0.1:9", "--timeout", "5"], 3, "no connection"),
    ],
)
def test_exit_statuses_before_anything_is_pushed(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    said: str,
) -> None:
    assert main([str(checkpoint), *arguments]) == status
    assert said in capsys.readouterr().err


def test_a_checkpoint_that_is_none_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--url", "http://127.0.0.1:9"]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_the_outcome_of_no_failure_some_and_all() -> None:
    good, bad = ServerOutcome("a", ()), ServerOutcome("b", (), "no", True)
    outcome = PushOutcome("c", 1, 2, "v", False, False, 0.0, (good, good))
    assert outcome.exit_status == 0
    assert replace(outcome, servers=(good, bad)).exit_status == 1
    assert replace(outcome, servers=(bad, bad)).exit_status == 3
