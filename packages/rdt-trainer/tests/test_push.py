"""Pushing a checkpoint, over real reads, into deployments that need no inference engine."""

import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from rdt_trainer import ClientError, SourceError
from rdt_trainer.push import (
    PushOptions,
    PushOutcome,
    ServerOutcome,
    Stage,
    WorkerReads,
    command,
    push,
)
from rdt_trainer.push.command import EXIT_STATUS, main
from rdt_trainer.push.display import show_outcome
from rdt_trainer.testing import TorchEngineClient
from rdt_trainer.testing.pushed_engine import PushedEngine
from rdt_transport.checksums import region_checksum, split_checksums
from rdt_transport.wire.nixl import NixlWire

OPTIONS = PushOptions("v7", timeout_seconds=20.0)
PUSHED = ["init", "pause", "start", "update", "finish", "reset_prefix_cache", "resume", "shutdown"]


MEANT = {"unknown": "mixture", "new": "with the new weights"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-7"
    folder.mkdir()
    generator = torch.Generator().manual_seed(7)
    names = ["model.embed.weight", "model.layers.0.w", "model.layers.1.w", "model.norm.weight"]
    weights = {name: torch.randn(6, 8, generator=generator).bfloat16() for name in names}
    save_file(weights, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", (1, 1))  # clocks of files are coarse
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
    engines = [PushedEngine(num_workers=2), PushedEngine()]
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
    assert [stage for stage, _, _ in stages] == [
        Stage.REACH,
        Stage.ATTACH,
        Stage.PAUSE,
        Stage.PUSH,
    ]
    _, done, total = stages[-1]
    assert done() == total == 2 * outcome.num_bytes


def test_a_dry_run_tells_the_plan_and_touches_nothing(checkpoint: Path) -> None:
    engine = PushedEngine(num_workers=2)
    before = push(checkpoint, [engine], PushOptions("v7", dry_run=True, timeout_seconds=20.0))
    assert engine.calls == ["init", "shutdown"]
    assert not has(engine, checkpoint)
    after = push(checkpoint, [engine], OPTIONS)
    workers = [outcome.servers[0].workers for outcome in (before, after)]
    assert workers[0] == workers[1]
    assert [outcome.servers[0].weights for outcome in (before, after)] == ["old", "new"]
    assert [read.num_tensors for read in before.servers[0].workers] == [4, 4]
    assert json.loads(json.dumps(before.to_json()))["exit_status"] == 0


@pytest.mark.parametrize(
    ("fails", "weights"),
    [
        ("pause", "old"),
        ("start", "old"),
        ("update", "unknown"),
        ("finish", "unknown"),
        ("reset_prefix_cache", "new"),
        ("resume", "new"),
    ],
)
def test_a_server_that_fails_is_told_and_serves_on_only_if_untouched(
    checkpoint: Path, fails: str, weights: str
) -> None:
    is_paused = weights != "old"
    good, bad = PushedEngine(), PushedEngine(fails=fails, name="http://bad")
    outcome = push(checkpoint, [good, bad], OPTIONS)
    assert outcome.exit_status == 1
    assert outcome.servers[0].failure is None
    assert has(good, checkpoint)
    assert f"http://bad/{fails}: HTTP 500: no" in (outcome.servers[1].failure or "")
    assert outcome.servers[1].weights == weights
    assert outcome.servers[1].is_paused is bad.is_paused() is is_paused
    said = f"was left paused, .*{MEANT[weights]}" if is_paused else "serves the old weights"
    assert re.match(f"http://bad {said}", outcome.servers[1].state)
    assert outcome.servers[0].state == "http://engine serves the new weights"

    outcome = push(checkpoint, [bad], OPTIONS)
    assert outcome.exit_status == 3
    assert f"http://bad/{fails}: HTTP 500: no" in (outcome.servers[0].failure or "")


def test_a_server_that_cannot_attach_stops_the_push_before_anybody_pauses(
    checkpoint: Path,
) -> None:
    good, bad = PushedEngine(), PushedEngine(fails="init", name="http://bad")
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


def test_to_verify_is_to_send_what_each_worker_should_find(checkpoint: Path) -> None:
    engines = [PushedEngine(num_workers=2), PushedEngine()]
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
        (["--url", "http://127.0.0.1:9", "--timeout", "inf"], 2, "--timeout"),
        (["--url", "http://127.0.0.1:9", "--device", "foo"], 2, "device is 'foo'"),
        (["--url", "http://127.0.0.1:9", "--host", "203.0.113.7"], 2, "--host 203.0.113.7"),
        (["--url", "http://127.0.0.1:9", "--host", "0.0.0.0"], 2, "host is 0.0.0.0"),
        (["--url", "http://127.0.0.1:9?a=b"], 2, "expected http://host:port"),
        (["--url", "http://127.0.0.1:nine"], 2, "expected http://host:port"),
        (["--url", "http://127.0.0.1:8000/v1"], 2, "give no path"),
        (["--url", "http://127.0.0.1:8000/v1/"], 2, "give no path"),
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


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rdt-push {importlib.metadata.version('rdt-trainer')}\n"


def test_a_name_that_all_loaders_pass_over_is_told_with_the_option(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = TorchEngineClient(NixlWire, ignores=["model.norm.weight"])
    monkeypatch.setattr(command, "HttpClient", lambda *_, **__: engine)
    assert main([str(checkpoint), "--url", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert "rdt-push: 'model.norm.weight' of the checkpoint: read by no worker" in said
    assert "--unconsumed 'model.norm.*'" in said and "RdtTrainer(" not in said


def test_what_one_waits_for_is_what_is_shown(checkpoint: Path) -> None:
    """Also where one server hangs, or fails: no bar of a stage that is over."""
    begun: list[Stage] = []
    for fails, expected in (("is_paused", Stage.REACH), ("init", Stage.ATTACH)):
        engine = PushedEngine(fails=fails)
        with pytest.raises(ClientError):
            push(checkpoint, [engine], OPTIONS, lambda stage, *_: begun.append(stage))
        assert begun[-1] is expected
    seen: dict[str, Stage] = {}
    engine = PushedEngine(before=lambda call: seen.setdefault(call, begun[-1]) and None)
    push(checkpoint, [engine], OPTIONS, lambda stage, *_: begun.append(stage))
    assert seen["is_paused"] is Stage.REACH
    assert seen["init"] is Stage.ATTACH
    assert seen["pause"] is Stage.PAUSE
    assert seen["start"] is seen["update"] is Stage.PUSH


def test_a_server_that_is_given_twice_is_pushed_to_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = {}

    def client_of(url: str, **options: object) -> PushedEngine:
        assert url not in engines
        return engines.setdefault(url, PushedEngine(name=url))

    monkeypatch.setattr(command, "HttpClient", client_of)
    monkeypatch.delenv("COLUMNS", raising=False)  # which the one who runs the tests may set
    given = ["http://localhost:80", "http://localhost/", "HTTP://LocalHost", "http://localhost:81"]
    arguments = [word for url in given for word in ("--url", url)]
    assert main([str(checkpoint), *arguments, "--host", "127.0.0.1"]) == 0
    assert list(engines) == ["http://localhost", "http://localhost:81"]
    printed = capsys.readouterr().out
    assert all(url in printed for url in engines), "each whole, also where there is no terminal"


def test_what_nobody_foresaw_has_a_status_of_its_own(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        command, "HttpClient", lambda *_, **__: PushedEngine(before=lambda _: 1 / 0)
    )
    assert main([str(checkpoint), "--url", "http://127.0.0.1:9"]) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("staged", [False, True])
def test_what_is_written_to_while_it_is_pushed_is_not_served(
    checkpoint: Path, staged: bool
) -> None:
    file = checkpoint / "model.safetensors"
    for call in ("start", "finish"):
        engine = PushedEngine(before=lambda made, call=call: made == call and file.touch())
        outcome = push(checkpoint, [engine], replace(OPTIONS, staged=staged))
        assert outcome.exit_status == 3
        assert "model.safetensors was written to" in (outcome.servers[0].failure or "")
        weights = outcome.servers[0].weights
        assert weights == "unknown" or (call, weights) == ("start", "old")  # whoever is first
        assert engine.is_paused() is outcome.servers[0].is_paused is (weights == "unknown")


def test_servers_are_told_apart_where_it_is_narrow() -> None:
    urls = [f"http://inference-{at}.cluster.example:8000" for at in range(2)]
    reads = (WorkerReads(0, 0, 1_234, 1_234, 12_345_678_901, 12_345_678_902, 1_234),)
    servers = tuple(ServerOutcome(url, reads) for url in urls)
    outcome = PushOutcome("c", 1, 2, "v", False, False, 0.0, servers)
    console = Console(width=80, file=io.StringIO(), record=True)
    show_outcome(console, outcome)
    printed = console.export_text()
    assert "…" not in printed
    cells = [line.split("│")[1].strip() for line in printed.splitlines() if line.count("│") > 7]
    assert "".join(cells) == "".join(urls)


@pytest.mark.parametrize("dry_run", [False, True])
def test_who_cannot_attach_is_left_to_whom_it_is_attached_to(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dry_run: bool,
) -> None:
    """Nothing is posted to it but the question; what was paused before is told."""
    good, bad = PushedEngine(), PushedEngine(fails="init", name="http://bad")
    bad.pause()
    engines = {"http://good": good, "http://bad": bad}
    monkeypatch.setattr(command, "HttpClient", lambda url, **_: engines[url])
    words = [word for url in engines for word in ("--url", url)]
    words += ["--host", "127.0.0.1", "--json", *(["--dry-run"] if dry_run else [])]
    assert main([str(checkpoint), *words]) == 3
    printed = capsys.readouterr()
    said = json.loads(printed.out)["error"]
    for text in (said, printed.err):
        assert "http://bad/init: HTTP 500: no" in text
        assert "http://bad was left paused, as it was before this push" in text
        assert "nothing was changed" in text
        assert "while closing" not in text
    assert bad.calls == ["pause", "init"]
    assert bad.is_paused()
    assert good.calls in (["init", "shutdown"], ["init"])


def test_an_address_in_brackets_is_printed_whole() -> None:
    outcome = PushOutcome(
        "c", 1, 2, "v", False, False, 0.0, (ServerOutcome("http://[fe80::1]", ()),)
    )
    console = Console(width=120, file=io.StringIO(), record=True)
    show_outcome(console, outcome)
    assert "http://[fe80::1]" in console.export_text()


def test_every_status_is_documented() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    table = readme.partition("| exit status | |")[2].partition("\n\n")[0]
    told = " ".join(re.findall(r"^\| ([\d, ]+) \|", table, re.M))
    assert {int(each) for each in re.findall(r"\d+", told)} == EXIT_STATUS.keys()


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
