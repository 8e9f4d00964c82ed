"""A push that is interrupted at any moment, by any signal, leaves servers as it says."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rdt_trainer.push import command
from rdt_trainer.push.interrupts import SignalInterrupt, interrupted_by_signals
from rdt_trainer.push.server import PushedServer
from rdt_trainer.testing.pushed_engine import PushedEngine

SECONDS = 20.0
STATES = {
    "init": "serves the old weights",
    "pause": "serves the old weights",
    "start": "serves the old weights",
    "update": "was left paused, as its workers may hold a mixture",
    "finish": "was left paused, as its workers may hold a mixture",
    "reset_prefix_cache": "serves the new weights",
    "resume": "serves the new weights",
}


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the command lets its servers go on."""
    event, recover = threading.Event(), PushedServer.recover

    def note(server: PushedServer) -> None:
        recover(server)
        event.set()

    monkeypatch.setattr(PushedServer, "recover", note)
    return event


def settled(is_so: Callable[[], bool]) -> bool:
    """Whether it becomes so: a pause that outlives its push ends on a thread of its own."""
    deadline = time.monotonic() + SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_so()


def interrupting(number: int, at: str, given_up: threading.Event) -> Callable[[str], None]:
    """Interrupts this process in that call, once, which ends after that."""
    pending = [at]

    def before(call: str) -> None:
        if call in pending:
            pending.clear()
            os.kill(os.getpid(), number)
            given_up.wait(0.5 if call == "init" else SECONDS)

    return before


@pytest.mark.parametrize("at", STATES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_lets_servers_go_on_and_says_what_became_of_each(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given_up: threading.Event,
    number: int,
    at: str,
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    save_file({"model.layers.0.w": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    engine = PushedEngine(before=interrupting(number, at, given_up))
    monkeypatch.setattr(command, "HttpClient", lambda *_, **__: engine)
    words = [str(tmp_path), "--url", "http://127.0.0.1:9", "--json", "--timeout", str(SECONDS)]
    status = command.main(words)
    printed = capsys.readouterr()
    assert status == 128 + number
    said = json.loads(printed.out)
    assert said["exit_status"] == status
    for text in (said["error"], printed.err):
        assert f"{engine.name} {STATES[at]}" in text
    assert settled(lambda: engine.is_paused() == ("paused" in STATES[at]))
    assert "shutdown" in engine.calls
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("at", ["init", "pause", "start"])
def test_one_that_an_earlier_push_left_torn_stays_paused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given_up: threading.Event,
    at: str,
) -> None:
    save_file({"model.layers.0.w": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    engine = PushedEngine()
    monkeypatch.setattr(command, "HttpClient", lambda *_, **__: engine)
    words = [str(tmp_path), "--url", "http://127.0.0.1:9", "--timeout", str(SECONDS)]
    for call, said in (("update", "may hold a mixture"), (at, "as it was before this push")):
        engine.before = interrupting(signal.SIGINT, call, given_up)
        assert command.main(words) == 130
        assert f"{engine.name} was left paused, " in (printed := capsys.readouterr().err)
        assert said in printed
        assert engine.is_paused()
        given_up.clear()
    assert command.main(words) == 0
    assert not engine.is_paused()


def test_a_server_whose_requests_do_not_end_is_let_go_and_detached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It serves, as it says when it is asked, whatever its pause would make of it."""
    said, ends = [], threading.Event()

    def hang(call: str) -> None:
        if call == "pause":
            os.kill(os.getpid(), signal.SIGTERM)
            ends.wait(SECONDS)
        elif call == "resume":
            said.append(capfd.readouterr().err)

    save_file({"model.layers.0.w": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    engine = PushedEngine(before=hang)
    monkeypatch.setattr(command, "HttpClient", lambda *_, **__: engine)
    status = command.main([str(tmp_path), "--url", "http://127.0.0.1:9", "--timeout", "20"])
    assert status == 143
    assert "terminated: letting the servers go" in said[0], "at once"
    printed = capfd.readouterr().err
    assert f"{engine.name} serves the old weights; a pause under way may still land" in printed
    assert "left paused" not in printed and "still in a call" not in printed
    assert engine.calls == ["init", "resume", "shutdown"]
    ends.set()
    assert settled(lambda: engine.calls[-2:] == ["pause", "resume"])


def test_signals_that_the_process_ignores_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupted_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(SignalInterrupt, match="SIGTERM"):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_changes_nothing() -> None:
    seen = []

    def look() -> None:
        with interrupted_by_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]
