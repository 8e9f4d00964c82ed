import threading

import pytest

from rdt_trainer.call_thread import CallThread


def test_calls_follow_one_another_and_errors_are_theirs():
    thread, made = CallThread("calls"), []
    futures = [thread.submit(lambda each=each: made.append(each)) for each in range(3)]
    failing = thread.submit(lambda: 1 // 0)
    after = thread.submit(lambda: made.append("after"))
    with pytest.raises(ZeroDivisionError):
        failing.result(30)
    assert [future.result(30) for future in [*futures, after]] == [None] * 4
    assert made == [0, 1, 2, "after"]
    thread.close(wait=True)
    assert "calls" not in [each.name for each in threading.enumerate()]


def test_a_call_that_is_cancelled_while_it_waits_is_not_made():
    thread, release, made = CallThread("calls"), threading.Event(), []
    first = thread.submit(lambda: made.append(release.wait(30)))
    second = thread.submit(lambda: made.append("second"))
    assert second.cancel()
    release.set()
    thread.close(wait=True)
    assert first.done() and made == [True]
