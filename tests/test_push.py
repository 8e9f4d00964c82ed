"""`rdt-push` against stock servers: from the command line, and with a checkpoint that goes bad."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rdt_trainer import ClientError, HttpClient, ModuleSource, RdtTrainer, SafetensorsSource
from rdt_trainer.push import PushOptions, Stage, push
from rdt_trainer.safetensors_header import read_header
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from tests.http_servers import Completion, Load, Servers, counting_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# Not even an installation of Ray is needed.
PUSH = (
    "import sys; sys.modules['ray'] = None; "
    "from rdt_trainer.push.command import main; sys.exit(main(sys.argv[1:]))"
)
SECONDS = 120.0

# It says when it is about to pause, and does when it gets a line.
HELD_PUSH = """
import signal, sys; sys.modules['ray'] = None
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the one who tests ignores
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from rdt_trainer.push import command
class Held(command.HttpClient):
    def pause(self, mode):
        print("about to pause", flush=True)
        sys.stdin.readline()
        super().pause(mode)
    def shutdown(self):
        super().shutdown()
        print("detached", flush=True)
command.HttpClient = Held
sys.exit(command.main(sys.argv[1:]))
"""


def checkpoint(folder: Path, step: int, **options: Any) -> Path:
    """Of a model that counts by ``step``, as `save_pretrained` writes it."""
    model = counting_model(step, seed=step)
    if not options:
        return write_checkpoint(model, folder / f"step-{step}")  # type: ignore[arg-type]
    model.save_pretrained(folder / f"step-{step}", **options)  # type: ignore[operator]
    return folder / f"step-{step}"


@pytest.fixture(autouse=True)
def serving_on(servers: Servers) -> Iterator[None]:
    """Whatever a test leaves paused does not hang the next one."""
    yield
    for url in servers.urls:
        with HttpClient(url) as client:
            client.resume()


def rdt_push(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, what was printed as JSON, and what was said beside it."""
    command = [sys.executable, "-c", PUSH, *arguments, "--json", "--timeout", "120"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return ran.returncode, json.loads(ran.stdout or "{}"), ran.stderr


def test_a_sharded_checkpoint_goes_into_two_servers_under_load(
    servers: Servers, tmp_path: Path
) -> None:
    pushed = checkpoint(tmp_path, 7, max_shard_size="300KB")
    assert len(list(pushed.glob("*.safetensors"))) > 2
    urls = [word for url in servers.urls for word in ("--url", url)]
    with Load(servers) as load:
        load.wait_for(lambda each: True)
        status, said, errors = rdt_push(str(pushed), *urls, "--verify")
        assert status == 0, errors
        load.wait_for(lambda each: each.step == 7)
    steps = [each.step for each in load.completions]
    assert None not in steps
    assert steps == sorted(steps, key=lambda step: step == 7)
    for at in (0, 1):
        assert servers.complete(at).step == 7
        assert servers.weight_version(at) == "step-7"
        assert not servers.is_paused(at)
    assert said["is_verified"] is True
    assert [server["url"] for server in said["servers"]] == servers.urls
    for server in said["servers"]:
        (reads,) = server["workers"]
        assert server["failure"] is None
        assert reads["bytes_direct"] + reads["bytes_staged"] >= said["num_bytes"]


def test_a_dry_run_prints_the_plan_and_changes_nothing(servers: Servers, tmp_path: Path) -> None:
    before, version = servers.complete(), servers.weight_version()
    pushed = checkpoint(tmp_path, 8)
    status, said, errors = rdt_push(str(pushed), "--url", servers.urls[0], "--dry-run")
    assert status == 0, errors
    (reads,) = said["servers"][0]["workers"]
    assert (reads["worker"], reads["owner"], reads["num_tensors"]) == (0, 0, said["num_tensors"])
    assert servers.complete().tokens == before.tokens
    assert servers.weight_version() == version
    words = ["-m", "rdt_trainer.push", str(pushed), "--url", servers.urls[0], "--dry-run"]
    table = subprocess.run(
        [sys.executable, *words, "--staged"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert table.returncode == 0, table.stderr
    assert "nothing was pushed (dry run)" in table.stdout
    assert f"{said['num_tensors']:,}" in table.stdout


def test_bytes_that_change_on_their_way_are_found_and_never_served(
    servers: Servers, tmp_path: Path
) -> None:
    """A byte of the mapped file is flipped after its checksum was taken; a second push heals."""
    pushed = checkpoint(tmp_path, 9)
    file = pushed / "model.safetensors"
    options = PushOptions("nine", verify=True, timeout_seconds=SECONDS)
    version = servers.weight_version()

    def flips(name: str) -> Callable[..., None]:
        at = read_header(file)[name].begin

        def on_progress(stage: Stage, done: object, total: int) -> None:
            if stage is Stage.PUSH:
                written = file.stat().st_mtime_ns
                with file.open("r+b") as opened:
                    opened.seek(at)
                    (byte,) = opened.read(1)
                    opened.seek(at)
                    opened.write(bytes([byte ^ 1]))
                os.utime(file, ns=(written, written))  # as memory goes bad: nobody wrote

        return on_progress

    with HttpClient(servers.urls[0], timeout_seconds=SECONDS) as client:
        for name in ("model.norm.weight", "model.layers.1.mlp.down_proj.weight"):
            outcome = push(pushed, [client], options, flips(name))
            assert outcome.exit_status == 3
            failure = outcome.servers[0].failure or ""
            assert "other than what was sent, by the checksums of 1 of its slices" in failure
            assert name in failure
            assert outcome.servers[0].is_paused
            assert servers.is_paused()
            assert servers.weight_version() == version
        outcome = push(pushed, [client], options)
    assert outcome.exit_status == 0
    assert servers.complete().step == 9
    assert servers.weight_version() == "nine"


@pytest.mark.parametrize(
    ("number", "loaded"),
    [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGHUP, True)],
)
def test_one_that_is_ended_while_requests_end_leaves_nobody_paused(
    servers: Servers, tmp_path: Path, number: int, loaded: bool
) -> None:
    """Under load the server has work again as soon as it resumes, so the pause never ends."""
    before, version = servers.complete(), servers.weight_version()
    pushed = checkpoint(tmp_path, 11)
    ended: list[Completion] = []
    asking = threading.Thread(target=lambda: ended.append(servers.complete(0, 400)))
    arguments = [str(pushed), "--url", servers.urls[0], "--timeout", "120"]
    command = [sys.executable, "-c", HELD_PUSH, *arguments]
    pipe = subprocess.PIPE
    with (
        Load(servers) if loaded else nullcontext(),
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as pushing,
    ):
        assert pushing.stdin is not None and pushing.stdout is not None
        assert pushing.stdout.readline() == "about to pause\n"
        asking.start()
        servers.wait_until_generating()
        pushing.stdin.write("\n")
        pushing.stdin.flush()
        while not servers.is_paused():
            assert pushing.poll() is None
        pushing.send_signal(number)
        printed, said = pushing.communicate(timeout=120)
    assert pushing.returncode == 128 + number
    assert "letting the servers go" in said
    assert f"{servers.urls[0]} serves the old weights" in said
    assert "left paused" not in said and "still in a call" not in said
    assert printed == "detached\n"
    asking.join()
    assert not servers.is_paused()
    assert ended[0].finish_reason == "length"
    assert ended[0].step == before.step
    assert servers.complete().tokens == before.tokens
    assert servers.weight_version() == version


class FailsUntouched(HttpClient):
    """Fails as soon as its server is paused, before its weights are touched."""

    def start(self) -> None:
        raise ClientError("interrupted here", server_text="")


def test_what_was_paused_before_serves_again_only_after_a_whole_push(
    servers: Servers, tmp_path: Path
) -> None:
    pushed = checkpoint(tmp_path, 13)
    options = PushOptions("thirteen", timeout_seconds=SECONDS)
    with ExitStack() as stack:
        good, bad = (stack.enter_context(FailsUntouched(url)) for url in servers.urls)
        bad.pause("wait")  # as an earlier push leaves it, when it was interrupted
        outcome = push(pushed, [good, bad], options)
    assert outcome.exit_status == 3
    assert [servers.is_paused(at) for at in (0, 1)] == [False, True]
    assert outcome.servers[0].state == f"{servers.urls[0]} serves the old weights"
    assert "was left paused, as it was before this push" in outcome.servers[1].state
    assert "a mixture" in outcome.servers[1].state
    for arguments in (["--dry-run"], ["--url", "http://127.0.0.1:9"]):
        rdt_push(str(pushed), "--url", servers.urls[1], *arguments)
        assert servers.is_paused(1)
    status, _, errors = rdt_push(str(pushed), "--url", servers.urls[1])
    assert status == 0, errors
    assert not servers.is_paused(1)
    assert servers.complete(1).step == 13


@pytest.mark.parametrize("option", ["--dry-run", "--verify"])
def test_a_push_that_is_refused_leaves_the_server_to_its_trainer(
    servers: Servers, tmp_path: Path, option: str
) -> None:
    inits = []

    class Counts(HttpClient):
        def init(self, init_info: Any) -> None:
            inits.append(self.name)
            super().init(init_info)

    pushed = checkpoint(tmp_path, 14)
    source = SafetensorsSource(pushed)
    with (
        Counts(servers.urls[0], timeout_seconds=SECONDS) as client,
        RdtTrainer(source, client, timeout_seconds=SECONDS) as trainer,
    ):
        trainer.init()
        both = [word for url in reversed(servers.urls) for word in ("--url", url)]
        status, said, errors = rdt_push(str(pushed), *both, option)
        assert status == 3
        assert "is attached to job" in said["error"]
        assert "POST /shutdown_weight_transfer_engine" in said["error"]
        assert "nothing was changed" in said["error"]
        assert "while closing" not in errors
        assert not servers.is_paused()
        client.pause()
        trainer.send_weights("fourteen")
        client.reset_prefix_cache()
        client.resume()
    assert inits == [servers.urls[0]], "it never had to attach again"
    assert servers.complete().step == 14


def test_one_server_by_two_names_is_refused_before_it_is_touched(
    servers: Servers, tmp_path: Path
) -> None:
    before, version = servers.complete(), servers.weight_version()
    names = (servers.urls[0], servers.urls[0].replace("127.0.0.1", "localhost"))
    assert names[0] != names[1]
    pushed = checkpoint(tmp_path, 12)
    status, said, errors = rdt_push(
        str(pushed), *(word for url in names for word in ("--url", url))
    )
    assert (status, said["exit_status"]) == (3, 3), errors
    assert "workers attached" in said["error"]
    assert not servers.is_paused()
    assert servers.complete().tokens == before.tokens
    assert servers.weight_version() == version


def test_one_bad_url_stops_it_before_any_server_is_touched(
    servers: Servers, tmp_path: Path
) -> None:
    before, version = servers.complete(), servers.weight_version()
    pushed = checkpoint(tmp_path, 10)
    status, said, errors = rdt_push(
        str(pushed), "--url", servers.urls[0], "--url", "http://127.0.0.1:9"
    )
    assert (status, said["exit_status"]) == (3, 3)
    assert "no connection" in said["error"]
    assert "http://127.0.0.1:9" in errors
    assert servers.complete().tokens == before.tokens
    assert servers.weight_version() == version


def others(kind: str) -> dict[str, torch.Tensor]:
    """A checkpoint that is not of the model that is served."""
    weights = dict(ModuleSource(counting_model(15)).iter_full())
    last = "model.layers.1."
    match kind:
        case "shallower":
            return {name: each for name, each in weights.items() if not name.startswith(last)}
        case "deeper":
            more = {name.replace(last, "model.layers.2."): each for name, each in weights.items()}
            return weights | more
        case "wider":
            return {name: torch.cat([each, each], dim=-1) for name, each in weights.items()}
        case "more":
            return weights | {"value_head.weight": weights["model.norm.weight"]}
    from rdt_vllm.testing.tiny_models import TINY_QWEN3_MOE

    return dict(ModuleSource(TINY_QWEN3_MOE.build(1)).iter_full())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shallower", "the checkpoint lacks model.layers.1."),
        ("deeper", "500: 'model.layers.2."),
        ("wider", "500: '"),
        ("more", "500: 'value_head.weight' of the checkpoint"),
        ("more", "--unconsumed 'value_head.*'"),
        ("another", "experts"),
    ],
)
def test_another_models_checkpoint_is_told_in_the_workers_words(
    servers: Servers, tmp_path: Path, kind: str, said: str
) -> None:
    before = servers.complete()
    pushed = write_weights(others(kind).items(), tmp_path / kind)
    status, _, errors = rdt_push(str(pushed), "--url", servers.urls[0])
    assert status == 3
    assert said in errors
    assert "nothing was changed" in errors
    assert not any(word in errors for word in ("collective_rpc", "stack trace", "exempt"))
    assert "while closing" not in errors
    assert not servers.is_paused()
    assert servers.complete().tokens == before.tokens


def test_names_that_need_no_reader_may_be_what_loaders_refuse(
    servers: Servers, tmp_path: Path
) -> None:
    pushed = write_weights(others("more").items(), tmp_path / "more")
    arguments = ["--url", servers.urls[0], "--unconsumed", "value_head.*", "--verify"]
    status, said, errors = rdt_push(str(pushed), *arguments)
    assert status == 0, errors
    (reads,) = said["servers"][0]["workers"]
    assert reads["num_tensors"] == said["num_tensors"] - 1
    assert servers.complete().step == 15
