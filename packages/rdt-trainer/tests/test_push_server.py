"""One server that is pushed to, given up at every moment: it serves old weights or none."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from rdt_trainer import ClientError, SourceError
from rdt_trainer.push.server import PushedServer, recover_all
from rdt_trainer.testing import TorchEngineClient
from rdt_trainer.testing.pushed_engine import PushedEngine

SECONDS = 20.0


def settled(is_so: Callable[[], bool]) -> bool:
    """Whether it becomes so: a pause that outlives its push ends on a thread of its own."""
    deadline = time.monotonic() + SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_so()


def test_what_is_given_up_before_its_pause_is_not_paused() -> None:
    engine = PushedEngine()
    server = PushedServer(engine, "wait")
    server.recover()
    with pytest.raises(ClientError, match="given up before its weights"):
        server.start()
    assert engine.calls == []
    assert not server.is_paused and not server.is_pausing


@pytest.mark.parametrize("fails", ["", "pause"])
def test_a_pause_that_hangs_holds_nothing_up_and_is_undone_when_it_ends(fails: str) -> None:
    asked, ends = threading.Event(), threading.Event()

    def hang(call: str) -> None:
        if call == "pause":
            asked.set()
            assert ends.wait(SECONDS)

    engine = PushedEngine(before=hang, fails=fails)
    server = PushedServer(engine, "wait")
    giving_up = threading.Thread(target=lambda: asked.wait(SECONDS) and server.recover())
    giving_up.start()
    with pytest.raises(ClientError, match="given up before its weights"):
        server.start()
    giving_up.join()
    assert engine.calls == ["resume"]
    assert server.is_pausing and not server.is_paused, "the server says that it is not"
    ends.set()
    assert settled(lambda: engine.calls == ["resume", "pause", "resume"])
    assert settled(lambda: not engine.is_paused() and not server.is_paused)
    assert not server.is_pausing


@pytest.mark.parametrize("really", [False, True])
def test_what_does_not_answer_the_resume_is_asked_whether_it_is_paused(really: bool) -> None:
    engine = PushedEngine()
    server = PushedServer(engine, "wait")
    server.start()
    if not really:
        engine.resume()
    engine.fails = "resume"
    server.recover()
    assert server.is_paused is really


def test_each_step_is_told_once_it_is_taken() -> None:
    engine, told = PushedEngine(), []
    server = PushedServer(engine, "wait", on_step=lambda step: told.append((step, *engine.calls)))
    engine.fails = "init"
    with pytest.raises(ClientError):
        server.init({})
    server.start()
    assert told == [("reached",), ("paused", "init", "pause")]


def test_what_was_given_up_and_serves_is_not_updated() -> None:
    engine = PushedEngine(before=lambda call: call == "start" and server.recover())
    server = PushedServer(engine, "wait")
    server.start()
    assert not engine.is_paused()
    with pytest.raises(ClientError, match="given up before its weights were touched"):
        server.update({"epoch": 1})
    assert engine.calls == ["pause", "resume", "start"]
    assert server.weights == "old"


@pytest.mark.parametrize("at", ["init", "is_paused", "pause", "start", ""])
@pytest.mark.parametrize("was_paused", [False, True])
def test_what_was_paused_before_is_not_let_go_on(
    at: str, was_paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier push may have torn it: only new weights, whole, may be served."""
    monkeypatch.setattr(TorchEngineClient, "init", lambda self, info: None)
    engine = PushedEngine()
    if was_paused:
        engine.pause()
    server = PushedServer(engine, "wait")
    engine.fails = at
    with pytest.raises(ClientError) if at else nullcontext():
        server.init({})
        server.start()
    server.recover()
    engine.fails = ""
    assert engine.is_paused() is was_paused
    if at != "is_paused":
        assert server.is_paused is server.was_paused is was_paused


def test_who_was_paused_since_it_attached_is_not_let_go_on_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchEngineClient, "init", lambda self, info: None)
    engine = PushedEngine()
    server = PushedServer(engine, "wait")
    server.init({})
    engine.pause()
    server.start()
    server.recover()
    assert engine.is_paused() and server.is_paused
    late = PushedServer(engine, "wait")
    late.recover()
    with pytest.raises(ClientError, match="given up before"):
        late.start()
    assert engine.is_paused() and late.is_paused


def test_what_a_check_refuses_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise SourceError("written to")

    engine = PushedEngine()
    for call in ("update", "finish"):
        monkeypatch.setattr(engine, call, lambda given: None)
    server = PushedServer(engine, "wait", check)
    server.start()
    server.update({"epoch": 1})
    with pytest.raises(SourceError):
        server.finish()
    server.recover()
    assert engine.calls == ["pause", "start"]
    assert server.is_paused


def test_one_that_hangs_keeps_no_other_from_serving() -> None:
    ends = threading.Event()
    hanging = PushedEngine(before=lambda call: call == "resume" and ends.wait(SECONDS))
    failing, engine = PushedEngine(fails="resume"), PushedEngine()
    servers = [PushedServer(each, "wait") for each in (hanging, failing, engine)]
    for server in servers:
        server.start()
    recover_all(servers, 0.2)
    assert [server.is_paused for server in servers] == [True, True, False]
    assert not engine.is_paused()
    ends.set()
