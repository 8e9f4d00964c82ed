import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from rdt_trainer.control import Control
from rdt_trainer.errors import ClientError


class Deployment:
    """Records its calls; ``during`` is called with each one's name and may raise or wait."""

    def __init__(self, during: Callable[[str], None] = lambda call: None) -> None:
        self.name = "deployment"
        self.calls: list[tuple] = []
        self.during = during

    def _call(self, name: str, *arguments: object) -> None:
        self.calls.append((name, *arguments))
        self.during(name)

    def init(self, init_info):
        self._call("init", init_info)

    def start(self):
        self._call("start")

    def update(self, update_info):
        self._call("update", update_info)

    def finish(self, weight_version=None):
        self._call("finish", weight_version)

    def shutdown(self):
        self._call("shutdown")


def failing_in(name: str) -> Callable[[str], None]:
    def during(call: str) -> None:
        if call == name:
            raise ClientError(f"{name}: HTTP 500: out of memory", server_text="out of memory")

    return during


def waiting_in(name: str, call: str, release: threading.Event) -> None:
    if call == name:
        release.wait(30)


class Ends:
    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    def __call__(self, replica: int, error: BaseException | None) -> None:
        self.errors.append(error)


def test_every_client_is_driven_through_one_update():
    clients, ends = [Deployment(), Deployment()], Ends()
    control = Control(clients)
    control.init({0: {"replica": 0}, 1: {"replica": 1}}, 10)
    control.sync([0, 1], {"epoch": 4}, "4", ends)
    assert control.wait(10)
    assert control.close(10) == []
    assert ends.errors == [None, None]
    for replica, client in enumerate(clients):
        assert client.calls == [
            ("init", {"replica": replica}),
            ("start",),
            ("update", {"epoch": 4}),
            ("finish", "4"),
            ("shutdown",),
        ]


@pytest.mark.parametrize("call", ["start", "update", "finish"])
def test_an_error_ends_that_clients_update(call):
    client, ends = Deployment(failing_in(call)), Ends()
    control = Control([client])
    control.sync([0], {}, None, ends)
    assert control.wait(10)
    (error,) = ends.errors
    assert error.server_text == "out of memory"
    assert client.calls[-1][0] == call
    control.close(10)


class Hasty(Deployment):
    """Hands all its calls in at once; ``answered`` says that the update's answer came."""

    def __init__(self, during: Callable[[str], None] = lambda call: None) -> None:
        super().__init__(during)
        self.answered, self.installed = threading.Event(), threading.Event()

    def submit(self, update_info, weight_version):
        assert threading.current_thread() is threading.main_thread()
        self._call("submit", update_info, weight_version)
        return self.answers()

    def answers(self):
        yield "update"
        assert self.answered.wait(30)
        yield "finish"
        assert self.installed.wait(30)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_client_that_hands_its_calls_in_at_once_is_asked_to_on_the_callers_thread():
    client, ends = Hasty(), Ends()
    control = Control([client])
    control.sync([0], {"epoch": 4}, "4", ends)
    assert client.calls == [("submit", {"epoch": 4}, "4")]
    assert not control.is_finishing(0)  # though its finish is on its way
    client.answered.set()
    until(lambda: control.is_finishing(0))
    assert (ends.errors, control.is_busy(0)) == ([], True)
    client.installed.set()
    assert control.wait(10)
    assert ends.errors == [None]
    control.close(10)


def test_calls_that_cannot_be_handed_in_end_that_clients_update_alone():
    failing, ends = Hasty(failing_in("submit")), Ends()
    other = Deployment()
    control = Control([failing, other])
    control.sync([0, 1], {}, None, ends)
    assert control.wait(10)
    assert sorted(map(str, ends.errors)) == ["None", "submit: HTTP 500: out of memory"]
    assert other.calls[-1] == ("finish", None)
    control.close(10)


def test_only_the_replicas_that_are_named_are_driven():
    clients, ended = [Deployment(), Deployment(), Deployment()], []
    control = Control(clients)
    control.sync([2, 0], {}, None, lambda replica, error: ended.append(replica))
    assert control.wait(10)
    assert sorted(ended) == [0, 2]
    assert clients[1].calls == []
    control.close(10)


def test_each_replica_is_attached_for_itself():
    release = threading.Event()
    clients = [
        Deployment(failing_in("init")),
        Deployment(),
        Deployment(lambda call: waiting_in("init", call, release)),
    ]
    control = Control(clients)
    try:
        errors = control.init_each({0: {}, 1: {}, 2: {}}, 0.1)
        assert sorted(errors) == [0, 2]
        assert "out of memory" in str(errors[0])
        assert "end of init() on replica 2 (deployment); raise" in str(errors[2])
        assert [control.is_busy(replica) for replica in range(3)] == [False, False, True]
        assert not control.wait(0.01)
        assert control.wait(0, [0, 1])
    finally:
        release.set()
        assert control.wait(30)
        control.close(30)


def test_init_raises_the_first_error_without_waiting_for_the_others():
    release = threading.Event()
    slow = Deployment(lambda call: waiting_in("init", call, release))
    control = Control([slow, Deployment(failing_in("init"))])
    try:
        with pytest.raises(ClientError, match="out of memory"):
            control.init({0: {}, 1: {}}, 10)
        assert control.busy() == ["replica 0 (deployment)"]
    finally:
        release.set()
        assert control.close(30) == []


def test_each_replica_gets_its_own_info_whoever_comes_first():
    other_is_attached = threading.Event()

    class Late(Deployment):
        @property
        def init(self):
            """On a thread of the control, found only when the other replica has its info."""
            if threading.current_thread() is not threading.main_thread():
                other_is_attached.wait(5)
            return super().init

    late, prompt = Late(), Deployment(lambda call: other_is_attached.set())
    control = Control([late, prompt])
    control.init({0: {"replica": 0}, 1: {"replica": 1}}, 10)
    assert [client.calls for client in (late, prompt)] == [
        [("init", {"replica": 0})],
        [("init", {"replica": 1})],
    ]
    assert control.close(10) == []


def test_init_attaches_only_the_replicas_that_are_given():
    clients = [Deployment(), Deployment()]
    control = Control(clients)
    control.init({1: {"replica": 1}}, 10)
    assert [client.calls for client in clients] == [[], [("init", {"replica": 1})]]
    assert control.close(10) == []
    assert [client.calls[1:] for client in clients] == [[], [("shutdown",)]]


@pytest.mark.parametrize("is_first", [True, False])
def test_who_refused_to_attach_is_not_detached_from_whom_it_is_attached_to(is_first):
    refuses = Deployment(failing_in("init")) if is_first else Deployment()
    control = Control([refuses, Deployment()])
    if not is_first:
        control.init({0: {}}, 10)
        refuses.during = failing_in("init")
    assert control.init_each({0: {}, 1: {}}, 10).keys() == {0}
    assert control.close(10) == []
    assert ("shutdown",) not in refuses.calls


@pytest.mark.parametrize("attaches", [True, False])
def test_who_is_still_attaching_is_detached_if_it_does(attaches):
    release, both = threading.Event(), threading.Barrier(2)

    def during(call: str) -> None:
        if call == "init":
            both.wait(30)
            release.wait(30)
            if not attaches:
                failing_in("init")("init")

    def refuse(call: str) -> None:
        both.wait(30)
        failing_in("init")(call)

    hanging, refuses = Deployment(during), Deployment(refuse)
    control = Control([hanging, refuses])
    with pytest.raises(ClientError, match="out of memory"):
        control.init({0: {}, 1: {}}, 10)
    threading.Timer(0.1, release.set).start()
    assert control.close(30) == []
    assert [call[0] for call in hanging.calls] == ["init", "shutdown"][: 1 + attaches]
    assert [call[0] for call in refuses.calls] == ["init"]


def test_init_has_a_deadline_that_names_call_and_server(monkeypatch):
    monkeypatch.setattr("rdt_trainer.control.LAST_WORDS_SECONDS", 0.0)
    release = threading.Event()
    control = Control([Deployment(), Deployment(lambda call: waiting_in("init", call, release))])
    try:
        message = r"waited 0\.1 seconds for the end of init\(\) on replica 1 \(deployment\); raise"
        with pytest.raises(ClientError, match=message):
            control.init({0: {}, 1: {}}, 0.1)
    finally:
        release.set()
        assert control.wait(30)
        assert control.close(30) == []


@pytest.mark.parametrize(
    ("said", "is_other"),
    [
        ("Weight transfer not configured. Please set weight_transfer_config to enable it", True),
        (
            "Call failed: Invalid init_info for NCCLWeightTransferEngine: "
            "NCCLWeightTransferInitInfo.__init__() got an unexpected keyword argument 'address'",
            True,
        ),
        ("Init.__init__() got an unexpected keyword argument 'address'", True),
        ("Invalid init_info for RdtWeightTransferEngine: unexpected keyword argument 'x'", False),
        ("this worker is attached to job 'a'", False),
    ],
)
def test_who_has_another_backend_is_told_how_to_start_the_server(said, is_other):
    def during(call: str) -> None:
        if call == "init":
            raise ClientError(f"POST /init: HTTP 500: {said}", server_text=said, status=500)

    control = Control([Deployment(during)])
    with pytest.raises(ClientError, match="POST /init: HTTP 500") as caught:
        control.init({0: {}}, 10)
    assert ("""--weight-transfer-config '{"backend": "rdt"}'""" in str(caught.value)) is is_other
    assert (caught.value.server_text, caught.value.status) == (said, 500)
    assert control.close(10) == []


def test_a_client_that_does_not_return_is_named_and_not_waited_for():
    release = threading.Event()
    control = Control([Deployment(lambda call: waiting_in("start", call, release))])
    try:
        control.sync([0], {}, None, Ends())
        assert not control.wait(0.01)
        assert control.close(0.01) == ["replica 0 (deployment) is still in a call"]
    finally:
        release.set()
        assert control.wait(30)


def test_a_client_that_cannot_detach_is_reported():
    control = Control([Deployment(failing_in("shutdown"))])
    control.init({0: {}}, 10)
    assert control.close(10) == ["shutdown: HTTP 500: out of memory"]


def test_who_did_not_attach_in_time_is_not_waited_for_again(monkeypatch):
    monkeypatch.setattr("rdt_trainer.control.LAST_WORDS_SECONDS", 0.0)
    release = threading.Event()
    hanging, prompt = Deployment(lambda call: waiting_in("init", call, release)), Deployment()
    control = Control([hanging, prompt])
    try:
        with pytest.raises(ClientError):
            control.init({0: {}, 1: {}}, 0.1)
        release_late = threading.Timer(3, release.set)
        release_late.start()
        assert control.close(300) == ["replica 0 (deployment) is still in a call"]
        release_late.cancel()
    finally:
        release.set()
    assert [each.calls[-1][0] for each in (hanging, prompt)] == ["init", "shutdown"]


def test_what_waits_behind_a_call_that_hangs_is_never_made():
    release = threading.Event()
    client, ends = Deployment(lambda call: waiting_in("start", call, release)), Ends()
    control = Control([client])
    control.sync([0], {}, None, ends)
    assert control.close(0.01) == ["replica 0 (deployment) is still in a call"]
    (thread,) = [each._thread for each in control._threads.values()]
    release.set()
    thread.join(30)
    assert [call[0] for call in client.calls] == ["start", "update", "finish"]


HANGS = """
import threading
from rdt_trainer.control import Control

class Hangs:
    name = "hangs"
    def start(self):
        print("in a call", flush=True)
        threading.Event().wait()

Control([Hangs()]).sync([0], {}, None, print)
"""


def test_a_client_that_hangs_does_not_keep_the_process():
    ended = subprocess.run([sys.executable, "-c", HANGS], timeout=60, capture_output=True)
    assert ended.returncode == 0, ended.stderr


def test_clients_are_added_and_removed_without_the_others():
    first, second = Deployment(), Deployment()
    control = Control([first])
    control.init({0: {}}, 10)
    control.add(4, second)
    control.init({4: {"replica": 4}}, 10)
    assert (first.calls, second.calls) == ([("init", {})], [("init", {"replica": 4})])
    thread = control._threads[4]._thread
    assert control.remove(4, 10) == []
    assert second.calls[-1] == ("shutdown",)
    assert not thread.is_alive()
    assert control.close(10) == []
    assert first.calls[1:] == second.calls[1:] == [("shutdown",)]


def test_a_client_that_hangs_is_removed_all_the_same():
    release = threading.Event()
    hanging, ends = Deployment(lambda call: waiting_in("start", call, release)), Ends()
    control = Control([Deployment(), hanging])
    control.sync([1], {}, None, ends)
    thread = control._threads[1]._thread
    assert control.remove(1, 0.01) == ["replica 1 (deployment) is still in a call"]
    assert control.busy() == []
    assert control.close(10) == []
    release.set()
    thread.join(30)
    assert hanging.calls == [("start",), ("update", {}), ("finish", None)]  # no shutdown behind it
