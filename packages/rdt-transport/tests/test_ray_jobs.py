"""The thread that makes a ray wire's blocking calls; no Ray is needed."""

import subprocess
import sys
import threading

import pytest

from rdt_transport.wire._ray_jobs import Jobs

SECONDS = 20.0


def test_jobs_run_in_order_and_what_follows_runs_where_it_is_polled() -> None:
    jobs, done, followed = Jobs("jobs"), [], []
    for number in range(5):
        jobs.run(
            lambda number=number: done.append((number, threading.current_thread().name)),
            lambda outcome, number=number: followed.append((number, threading.get_ident())),
        )
    last = jobs.run(lambda: 7)
    assert last.result(SECONDS) == 7
    assert done == [(number, "jobs") for number in range(5)]
    assert followed == []
    jobs.poll()
    assert followed == [(number, threading.get_ident()) for number in range(5)]
    assert jobs.close(SECONDS)


def test_an_error_is_its_outcome_and_ends_nothing() -> None:
    jobs = Jobs("jobs")
    failing = jobs.run(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(SECONDS)
    assert jobs.run(lambda: 1).result(SECONDS) == 1
    assert jobs.close(SECONDS)


def test_what_waits_at_the_end_is_not_begun_and_nothing_follows() -> None:
    jobs, may_end, begun, followed = Jobs("jobs"), threading.Event(), threading.Event(), []

    def wait() -> None:
        begun.set()
        may_end.wait(SECONDS)

    jobs.run(wait, followed.append)
    waiting = jobs.run(lambda: followed.append("begun"), followed.append)
    assert begun.wait(SECONDS)
    assert not jobs.close(0.01)
    assert waiting.cancelled()
    may_end.set()
    jobs.poll()
    assert followed == []


def test_one_that_hangs_does_not_keep_the_process() -> None:
    program = """
import threading
from rdt_transport.wire._ray_jobs import Jobs
begun = threading.Event()
jobs = Jobs("jobs")
jobs.run(lambda: (begun.set(), threading.Event().wait()))
assert begun.wait(20)
assert not jobs.close(0.01)
"""
    ran = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True)
    assert ran.returncode == 0, ran.stderr
