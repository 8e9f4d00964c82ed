import logging
import threading

import pytest

from rdt_transport.errors import RendezvousLostError, SyncTimeoutError
from rdt_transport.serving_thread import ServingThread

WAIT_SECONDS = 20.0


def test_close_runs_what_is_queued_and_ends_the_thread(caplog):
    ran = []
    thread = ServingThread("rdt-serve-test", on_error=ran.append)
    thread.start()
    for number in range(3):
        thread.run(lambda number=number: ran.append(number))

    with caplog.at_level(logging.WARNING):
        thread.close(WAIT_SECONDS)
        thread.close(WAIT_SECONDS)

    assert ran == [0, 1, 2]
    assert caplog.text == ""
    assert "rdt-serve-test" not in {each.name for each in threading.enumerate()}


def test_a_thread_that_does_not_end_says_what_may_still_run(caplog):
    begun, release = threading.Event(), threading.Event()
    thread = ServingThread("rdt-serve-test", on_error=lambda error: None)
    thread.start()
    thread.run(lambda: (begun.set(), release.wait(WAIT_SECONDS)))
    assert begun.wait(WAIT_SECONDS)

    with caplog.at_level(logging.WARNING):
        thread.close(0.05)
    release.set()
    thread.close(WAIT_SECONDS)

    assert "rdt-serve-test has not ended within 0.05 s" in caplog.text
    assert "a pack may still read the sources" in caplog.text


def test_a_job_for_quiet_waits_for_the_end_of_the_epoch():
    ran, ended = [], threading.Event()
    thread = ServingThread("rdt-serve-test", on_error=ran.append)
    thread.start()
    thread.set_quiet(False)
    thread.run_when_quiet(lambda: ran.append("held"))
    thread.run(lambda: ran.append("at once"))
    thread.run(lambda: thread.set_quiet(True))
    thread.run(ended.set)
    assert ended.wait(WAIT_SECONDS)
    thread.close(WAIT_SECONDS)

    assert ran == ["at once", "held"]


def test_a_job_that_fails_is_handed_on_and_the_next_one_runs():
    seen = []
    thread = ServingThread("rdt-serve-test", on_error=seen.append)
    thread.start()
    error = ValueError("no")

    def fail():
        raise error

    thread.run(fail)
    thread.run(lambda: seen.append("next"))
    thread.close(WAIT_SECONDS)

    assert seen == [error, "next"]


@pytest.mark.parametrize("run", [ServingThread.run, ServingThread.run_when_quiet])
@pytest.mark.parametrize("error", [RendezvousLostError("it left"), ValueError("ours")])
def test_only_a_failure_that_is_nobodys_in_particular_is_logged_with_its_place(caplog, run, error):
    thread = ServingThread("rdt-serve-test", on_error=lambda error: None)
    thread.start()

    def fail():
        raise error

    run(thread, fail)
    thread.close(WAIT_SECONDS)

    assert f"failed: {error}" in caplog.text
    assert ("Traceback" in caplog.text) == isinstance(error, ValueError)


def test_a_queued_job_for_quiet_waits_when_an_epoch_opens_before_it():
    ran, begun, release = [], threading.Event(), threading.Event()
    thread = ServingThread("rdt-serve-test", on_error=ran.append)
    thread.start()
    thread.run(lambda: (begun.set(), release.wait(WAIT_SECONDS)))
    thread.run_when_quiet(lambda: ran.append("for quiet"))
    assert begun.wait(WAIT_SECONDS)
    thread.set_quiet(False)
    release.set()
    thread.run(lambda: ran.append("in the epoch"))
    thread.run(lambda: thread.set_quiet(True))
    ended = threading.Event()
    thread.run_when_quiet(ended.set)
    assert ended.wait(WAIT_SECONDS)
    thread.close(WAIT_SECONDS)

    assert ran == ["in the epoch", "for quiet"]


def test_a_job_for_quiet_that_runs_can_be_waited_for():
    begun, release = threading.Event(), threading.Event()
    thread = ServingThread("rdt-serve-test", on_error=lambda error: None)
    thread.start()
    thread.run_when_quiet(lambda: (begun.set(), release.wait(WAIT_SECONDS)))
    assert begun.wait(WAIT_SECONDS)
    thread.set_quiet(False)

    with pytest.raises(SyncTimeoutError, match=r"still being admitted or dismissed after 0\.01 s"):
        thread.wait_for_quiet_job(0.01)
    release.set()
    thread.wait_for_quiet_job(WAIT_SECONDS)
    thread.close(WAIT_SECONDS)


def test_a_job_for_quiet_that_fails_is_logged_and_fails_no_epoch(caplog):
    seen = []
    thread = ServingThread("rdt-serve-test", on_error=seen.append)
    thread.start()

    def fail():
        raise ValueError("no such consumer")

    with caplog.at_level(logging.ERROR):
        thread.run_when_quiet(fail)
        thread.run(lambda: seen.append("next"))
        thread.close(WAIT_SECONDS)

    assert seen == ["next"]
    assert "no such consumer" in caplog.text
