import threading
from collections.abc import Iterator

import pytest
import torch

from rdt_trainer.errors import ClientError
from rdt_trainer.local_client import LocalClient


class Llm:
    """The part of vllm.LLM that a trainer uses; requests are read as the real one reads dicts."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.cache_is_free = True

    def init_weight_transfer_engine(self, request):
        self.calls.append(("init", request["init_info"]))

    def start_weight_update(self):
        self.calls.append(("start",))

    def update_weights(self, request):
        if request["update_info"]["epoch"] < 0:
            raise ValueError("epoch -1 is not open")
        self.calls.append(("update", request["update_info"]))

    def finish_weight_update(self, weight_version=None):
        self.calls.append(("finish", weight_version))

    def sleep(self, level=1, mode="abort"):
        self.calls.append(("sleep", level, mode))

    def wake_up(self, tags=None):
        self.calls.append(("wake_up", tags))

    def reset_prefix_cache(self):
        return self.cache_is_free


def test_every_call_reaches_the_engine():
    llm = Llm()
    client = LocalClient(llm)
    client.init({"job": "j"})
    client.pause("keep")
    client.start()
    client.update({"epoch": 3})
    client.finish("3")
    client.reset_prefix_cache()
    client.resume()
    client.close()
    assert client.name == "Llm"
    assert llm.calls == [
        ("init", {"job": "j"}),
        ("sleep", 0, "keep"),
        ("start",),
        ("update", {"epoch": 3}),
        ("finish", "3"),
        ("wake_up", ["scheduling"]),
    ]


def test_engine_errors_become_client_errors_with_their_cause():
    with pytest.raises(ClientError, match=r"Llm\.update_weights: ValueError: epoch -1") as caught:
        LocalClient(Llm()).update({"epoch": -1})
    assert caught.value.server_text == "ValueError: epoch -1 is not open"
    assert isinstance(caught.value.__cause__, ValueError)


def test_held_cache_is_an_error():
    llm = Llm()
    llm.cache_is_free = False
    with pytest.raises(ClientError, match="still holds cached blocks"):
        LocalClient(llm).reset_prefix_cache()


def test_missing_method_names_what_was_expected():
    with pytest.raises(ClientError, match=r"Llm has no shutdown_weight.*vllm\.LLM 0\.29"):
        LocalClient(Llm()).shutdown()


class Hanging(Llm):
    """Waits for an answer that nobody will give, as vLLM does of an engine core that was killed."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def update_weights(self, request):
        self.release.wait()
        super().update_weights(request)

    def sleep(self, level=1, mode="abort"):
        self.release.wait()
        super().sleep(level, mode)

    def reset_prefix_cache(self):
        self.release.wait()
        return super().reset_prefix_cache()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    engine = Hanging()
    yield engine
    engine.release.set()


CALLS = {
    "update_weights": lambda client: client.update({"epoch": 1}),
    "sleep": lambda client: client.pause(),
    "reset_prefix_cache": lambda client: client.reset_prefix_cache(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_never_returns_is_given_up_and_named(hanging, name):
    client = LocalClient(hanging, timeout_seconds=0.05)
    with pytest.raises(ClientError, match=rf"^Hanging\.{name}: no answer within 0\.05 seconds; .*"):
        CALLS[name](client)


def test_an_engine_is_never_in_two_calls(hanging):
    client = LocalClient(hanging, timeout_seconds=0.05)
    with pytest.raises(ClientError, match="no answer"):
        client.update({"epoch": 1})
    with pytest.raises(ClientError, match=r"Hanging\.wake_up: update_weights has not returned"):
        client.resume()
    assert hanging.calls == []
    hanging.release.set()
    client._last[1].result()
    assert hanging.calls == [("update", {"epoch": 1})]


def test_calls_go_on_once_the_late_one_has_returned(hanging):
    client = LocalClient(hanging, timeout_seconds=0.05)
    with pytest.raises(ClientError, match="no answer"):
        client.update({"epoch": 1})
    hanging.release.set()
    client._last[1].result()
    client.resume()
    assert hanging.calls == [("update", {"epoch": 1}), ("wake_up", ["scheduling"])]


def test_no_thread_is_left_behind():
    client = LocalClient(Llm())
    client.start()
    for thread in threading.enumerate():
        if thread.name == "rdt-Llm":
            thread.join()  # for ever, else


class Gpus:
    """Whose current device and stream are each thread's own, as torch's are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._current = threading.local()
        self.set_device_index(0)
        self.log: list[tuple] = []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        for name in ("current_device_index", "set_device_index", "current_stream"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))

    def current_device_index(self) -> int:
        return getattr(self._current, "index", 0)

    def set_device_index(self, index: int) -> None:
        self._current.index = index

    def current_stream(self) -> "Gpus":
        return self

    def synchronize(self) -> None:
        self.log.append(("completed", self.current_device_index(), threading.get_ident()))

    def launch(self, *arguments: object) -> None:
        self.log.append(("enqueued", self.current_device_index(), threading.get_ident()))
        if arguments[-1:] == ("wrong",):
            raise ValueError("refused")


def test_what_an_engine_in_this_process_enqueued_on_its_gpu_has_completed(monkeypatch):
    gpus, llm = Gpus(monkeypatch), Llm()
    gpus.set_device_index(1)
    monkeypatch.setattr(llm, "finish_weight_update", gpus.launch)
    client = LocalClient(llm)
    gpus.set_device_index(0)
    client.finish("1")
    with pytest.raises(ClientError, match="refused"):
        client.finish("wrong")
    assert [(what, index) for what, index, _ in gpus.log] == [("enqueued", 1), ("completed", 1)] * 2
    threads = [thread for _, _, thread in gpus.log]
    assert threads[0::2] == threads[1::2]  # each waited for its own stream


def test_no_gpu_is_touched_where_none_was_before(monkeypatch):
    client = LocalClient(Llm())
    gpus = Gpus(monkeypatch)  # the trainer's, from now on
    client.finish("1")
    assert gpus.log == []
