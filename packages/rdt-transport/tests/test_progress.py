import subprocess
import sys
import threading
import time
import uuid

import pytest
import torch

from rdt_plan.doorbell import Doorbell, Kind
from rdt_transport.errors import WireError, WireTimeoutError
from rdt_transport.progress import ProgressThread
from rdt_transport.testing.wire_pair import random_bytes, region_of
from rdt_transport.wire.base import ReadDone
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire
from rdt_transport.wire.nixl import NixlWire

SECONDS = 20.0
SESSION = bytes(16)


class Recorder:
    """An endpoint that keeps what it is given, and raises where ``fails`` says."""

    def __init__(self, fails=(), busy=False):
        self.incarnation = uuid.uuid4().bytes
        self.fails = set(fails)
        self.busy = busy
        self.doorbells = []
        self.reads = []
        self.errors = []
        self.polls = 0

    def _maybe_fail(self, where):
        if where in self.fails:
            raise ValueError(where)

    def on_doorbell(self, wire, sender, doorbell):
        self.doorbells.append((sender, doorbell))
        self._maybe_fail("on_doorbell")

    def on_read(self, wire, event):
        self.reads.append(event)
        self._maybe_fail("on_read")

    def on_poll(self, wire):
        self.polls += 1
        self._maybe_fail("on_poll")

    def is_busy(self):
        self._maybe_fail("is_busy")
        return self.busy

    def is_urgent(self):
        self._maybe_fail("is_urgent")
        return self.busy

    def on_error(self, error):
        self.errors.append(str(error))
        self._maybe_fail("on_error")


def doorbell_for(receiver, seq=0):
    return Doorbell(SESSION, 1, uuid.uuid4().bytes, receiver, Kind.READY, seq)


def eventually(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


@pytest.fixture
def fabric():
    return InProcessFabric()


@pytest.fixture
def make(fabric):
    made = []

    def make_progress(role="a", make_wire=None):
        progress = ProgressThread(
            make_wire or (lambda: InProcessWire(fabric, role)), name=role, idle_poll_seconds=0.005
        )
        made.append(progress)
        return progress

    yield make_progress
    for progress in made:
        progress.close()


def connect(one, other):
    address = other.call(lambda wire: wire.address(), SECONDS)
    one.call(lambda wire: wire.connect(address, SECONDS), SECONDS)


def test_the_wire_lives_on_the_thread(make, fabric):
    threads = []

    class Watched(InProcessWire):
        def close(self):
            threads.append(threading.current_thread())
            super().close()

    def make_wire():
        threads.append(threading.current_thread())
        return Watched(fabric, "a")

    progress = make(make_wire=make_wire)
    name, thread = progress.call(lambda wire: (wire.name, threading.current_thread()), SECONDS)
    progress.close()

    assert progress.wire_name == name
    assert threads == [thread, thread]
    assert not thread.is_alive()


def test_what_making_the_wire_raises_is_raised_by_the_constructor(make):
    def make_wire():
        raise WireError("no wire today")

    with pytest.raises(WireError, match="no wire today"):
        ProgressThread(make_wire, name="a")


def test_a_call_gives_back_results_and_errors(make):
    progress = make()

    assert progress.call(lambda wire: 7, SECONDS) == 7
    with pytest.raises(TimeoutError, match="mine"):
        progress.call(lambda wire: (_ for _ in ()).throw(TimeoutError("mine")), SECONDS)
    assert progress.call(lambda wire: 8, SECONDS) == 8


def test_a_call_that_has_not_begun_in_time_never_runs(make):
    progress, release, ran = make(), threading.Event(), []
    progress.submit(lambda wire: release.wait(SECONDS))

    with pytest.raises(WireTimeoutError, match=r"a: a call has not begun within 0\.05 s"):
        progress.call(lambda wire: ran.append(1), 0.05)
    release.set()
    assert progress.call(lambda wire: list(ran), SECONDS) == []


def test_a_call_that_does_not_end_in_time_raises(make):
    progress, release = make(), threading.Event()

    with pytest.raises(WireTimeoutError, match=r"a: a call has not ended within 0\.05 s"):
        progress.call(lambda wire: release.wait(SECONDS), 0.05)
    release.set()


def test_a_function_with_the_same_deadline_raises_its_own_error(make):
    def wait_as_long(wire):
        time.sleep(0.1)
        raise WireTimeoutError("waited 0.1 s for peer p")

    with pytest.raises(WireTimeoutError, match="peer p"):
        make().call(wait_as_long, 0.1)


def test_a_call_from_the_thread_itself_is_refused(make):
    progress = make()

    with pytest.raises(WireError, match="would wait for itself"):
        progress.call(lambda wire: progress.call(lambda wire: 1, SECONDS), SECONDS)


def test_submitted_functions_run_in_order_and_their_errors_reach_their_endpoint(make):
    progress, endpoint, ran = make(), Recorder(), []
    for index in range(50):
        progress.submit(lambda wire, index=index: ran.append(index))
    progress.submit(lambda wire: 1 / 0, endpoint)
    progress.submit(lambda wire: 1 / 0)

    assert progress.call(lambda wire: list(ran), SECONDS) == list(range(50))
    assert endpoint.errors == ["division by zero"]


def test_doorbells_go_to_their_receiver_and_foreign_ones_are_counted(make):
    sender, receiver = make("s"), make("r")
    first, second = Recorder(), Recorder()
    receiver.attach(first)
    receiver.attach(second)
    connect(sender, receiver)
    messages = [
        doorbell_for(first.incarnation, 1),
        doorbell_for(second.incarnation, 2),
        doorbell_for(uuid.uuid4().bytes, 3),
        doorbell_for(first.incarnation, 4),
    ]
    for message in messages:
        sender.submit(lambda wire, m=message: wire.notify(receiver.wire_name, m.encode()))
    sender.submit(lambda wire: wire.notify(receiver.wire_name, b"no doorbell"))

    eventually(lambda: receiver.dropped == 2)
    name = sender.wire_name
    assert first.doorbells == [(name, messages[0]), (name, messages[3])]
    assert second.doorbells == [(name, messages[1])]


def test_reads_go_to_the_owner_of_their_handle(make):
    source, target = random_bytes(1000, 1), torch.zeros(1000, dtype=torch.uint8)
    server, reader = make("s"), make("r")
    owner, other = Recorder(), Recorder()
    reader.attach(owner)
    reader.attach(other)
    server.call(lambda wire: wire.register([source]), SECONDS)
    reader.call(lambda wire: wire.register([target]), SECONDS)
    connect(reader, server)
    regions = region_of(target), region_of(source)

    def post(wire, own):
        handle = wire.prepare_read(server.wire_name, [regions])
        if own:
            reader.own(handle, owner)
        wire.post(handle, doorbell_for(bytes(16)).encode())
        return handle

    owned = reader.call(lambda wire: post(wire, True), SECONDS)
    kept = reader.call(lambda wire: post(wire, False), SECONDS)

    eventually(lambda: reader.dropped == 1)
    assert kept is not owned
    assert owner.reads == [ReadDone(owned)]
    assert other.reads == []
    assert torch.equal(target, source)


@pytest.mark.parametrize("where", ["on_doorbell", "on_poll", "is_busy", "is_urgent"])
def test_an_endpoint_that_raises_is_told_and_others_go_on(make, where):
    sender, receiver = make("s"), make("r")
    faulty, sound = Recorder(fails={where, "on_error"}), Recorder()
    faulty.busy = True
    receiver.attach(faulty)
    receiver.attach(sound)
    connect(sender, receiver)
    for endpoint in (faulty, sound):
        message = doorbell_for(endpoint.incarnation).encode()
        sender.submit(lambda wire, m=message: wire.notify(receiver.wire_name, m))

    eventually(lambda: where in faulty.errors and len(sound.doorbells) == 1)
    assert sound.errors == []
    assert receiver.call(lambda wire: 1, SECONDS) == 1


def test_a_wire_that_fails_to_poll_tells_every_endpoint_once(make, fabric):
    failing = threading.Event()

    class Faulty(InProcessWire):
        def poll(self):
            if failing.is_set():
                raise WireError("cannot poll")
            return super().poll()

    progress = make(make_wire=lambda: Faulty(fabric, "a"))
    endpoints = [Recorder(), Recorder()]
    for endpoint in endpoints:
        progress.attach(endpoint)
    failing.set()
    eventually(lambda: all(endpoint.errors for endpoint in endpoints))
    polls = endpoints[0].polls
    eventually(lambda: endpoints[0].polls > polls + 3)

    assert [endpoint.errors for endpoint in endpoints] == [["cannot poll"]] * 2
    assert progress.call(lambda wire: 1, SECONDS) == 1


def test_a_detached_endpoint_hears_nothing_more(make):
    progress, endpoint = make(), Recorder()
    progress.attach(endpoint)
    with pytest.raises(WireError, match="is attached"):
        progress.attach(endpoint)
    eventually(lambda: endpoint.polls > 0)
    progress.detach(endpoint)
    progress.detach(endpoint)
    progress.call(lambda wire: None, SECONDS)
    polls = endpoint.polls
    for _ in range(5):
        progress.call(lambda wire: None, SECONDS)

    assert endpoint.polls == polls


def test_close_runs_what_was_given_and_refuses_what_comes_later(make):
    progress, ran = make(), []
    for index in range(20):
        progress.submit(lambda wire, index=index: ran.append((index, wire.poll())))
    progress.close()
    progress.close()

    assert ran == [(index, []) for index in range(20)]
    for refused in (
        lambda: progress.call(lambda wire: 1, SECONDS),
        lambda: progress.submit(lambda wire: None),
        lambda: progress.attach(Recorder()),
    ):
        with pytest.raises(WireError, match="a is closed"):
            refused()
    progress.detach(Recorder())


def test_a_close_that_is_held_up_says_so(make):
    progress, release = make(), threading.Event()
    progress.submit(lambda wire: release.wait(SECONDS))

    with pytest.raises(WireTimeoutError, match=r"a: has not ended within 0\.05 s"):
        progress.close(0.05)
    release.set()
    progress.close()


def test_two_nixl_wires_idle_at_a_small_part_of_a_core():
    first = ProgressThread(lambda: NixlWire("first"), name="first")
    second = ProgressThread(lambda: NixlWire("second"), name="second")
    try:
        connect(first, second)
        first.attach(Recorder())
        time.sleep(1.5)  # the lively second after the connect
        before, start = time.process_time(), time.monotonic()
        time.sleep(3.0)
        share = (time.process_time() - before) / (time.monotonic() - start)
    finally:
        first.close()
        second.close()

    assert share < 0.05


def test_a_forgotten_close_neither_hangs_nor_aborts_the_process():
    code = (
        "import torch\n"
        "from rdt_transport.progress import ProgressThread\n"
        "from rdt_transport.wire.nixl import NixlWire\n"
        "a = ProgressThread(lambda: NixlWire('a'), name='a')\n"
        "b = ProgressThread(lambda: NixlWire('b'), name='b')\n"
        "kept = torch.zeros(1 << 20)\n"
        "address = b.call(lambda wire: wire.address(), 20)\n"
        "a.call(lambda wire: (wire.register([kept]), wire.connect(address, 20)), 20)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )

    assert result.returncode == 0, result.stderr
