"""Any object with vLLM's four calls, driven as a client of ours."""

from types import SimpleNamespace

import pytest

from rdt_trainer.errors import ClientError
from rdt_trainer.four_calls import FourCallsClient


class Four:
    """What vLLM's protocol asks for, and not one method more."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def init_weight_transfer_engine(self, init_info):
        self.calls.append(("init", init_info))

    def start_weight_update(self):
        self.calls.append(("start",))

    def update_weights(self, update_info):
        if update_info["epoch"] < 0:
            raise ValueError("epoch -1 is not open")
        self.calls.append(("update", update_info))

    def finish_weight_update(self, weight_version=None):
        self.calls.append(("finish", weight_version))


class WithoutVersions(Four):
    def finish_weight_update(self):
        self.calls.append(("finish",))


class WithNamedVersions(Four):
    def finish_weight_update(self, *, weight_version=None):
        self.calls.append(("finish", weight_version))


class WithMore(Four):
    base_url = "http://here:1"

    def shutdown_weight_transfer_engine(self):
        self.calls.append(("shutdown",))


class RefusedError(Exception):
    """As an HTTP library's, whose own words leave out what the server said."""

    def __init__(self) -> None:
        super().__init__("500 Server Error")
        self.response = SimpleNamespace(text="no such epoch", status_code=500)


def drive(four: Four) -> list[tuple]:
    client = FourCallsClient(four, num_workers=2)
    assert client.num_workers == 2
    client.init({"job": "j"})
    client.start()
    client.update({"epoch": 3})
    client.finish("3")
    client.finish()
    client.shutdown()
    client.close()
    return four.calls


CALLS = [("init", {"job": "j"}), ("start",), ("update", {"epoch": 3})]


def test_the_four_calls_are_made():
    assert drive(Four()) == [*CALLS, ("finish", "3"), ("finish", None)]


def test_a_version_is_named_where_it_must_be():
    assert drive(WithNamedVersions()) == [*CALLS, ("finish", "3"), ("finish", None)]


def test_a_version_is_kept_from_whoever_takes_none():
    assert drive(WithoutVersions()) == [*CALLS, ("finish",), ("finish",)]


def test_a_fifth_call_is_made_where_there_is_one():
    assert drive(WithMore())[-1] == ("shutdown",)
    assert FourCallsClient(WithMore()).name == "http://here:1"
    assert FourCallsClient(Four()).name == "Four"


def test_an_error_carries_its_words():
    client = FourCallsClient(Four())
    with pytest.raises(ClientError, match=r"Four.update_weights: ValueError: epoch -1 is not open"):
        client.update({"epoch": -1})


def test_an_error_of_an_http_library_carries_the_servers_words():
    class Refusing(Four):
        def start_weight_update(self):
            raise RefusedError

    with pytest.raises(ClientError, match="500 Server Error: no such epoch") as caught:
        FourCallsClient(Refusing()).start()
    assert (caught.value.server_text, caught.value.status) == ("no such epoch", 500)


class Unread:
    """An answer of httpx's that was streamed."""

    status_code = 500

    @property
    def text(self):
        raise RuntimeError("the answer was not read")


@pytest.mark.parametrize(
    "response", [None, Unread(), SimpleNamespace(text=lambda: "later", status_code="500 no")]
)
def test_an_answer_that_shows_no_words_leaves_the_errors_own(response: object):
    error = ValueError("refused")
    error.response = response  # type: ignore[attr-defined]

    class Refusing(Four):
        def start_weight_update(self):
            raise error

    with pytest.raises(
        ClientError, match=r"Refusing\.start_weight_update: ValueError: refused$"
    ) as e:
        FourCallsClient(Refusing()).start()
    assert (e.value.server_text, e.value.status) == ("ValueError: refused", None)


@pytest.mark.parametrize("method", ["pause", "resume", "reset_prefix_cache"])
def test_what_is_not_among_the_four_is_refused(method: str):
    with pytest.raises(ClientError, match=f"cannot {method}"):
        getattr(FourCallsClient(Four()), method)()
