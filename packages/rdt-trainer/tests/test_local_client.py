import pytest

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
