"""Who lets go of memory, and when."""

import weakref

import pytest
import torch

from rdt_transport.events import HostEvents, events_of
from rdt_vllm.retired import Retired


class Mark:
    def __init__(self, completed: bool = False) -> None:
        self.completed = completed

    def query(self) -> bool:
        return self.completed


def retire(retired: Retired, mark: Mark) -> "weakref.ref[torch.Tensor]":
    tensor = torch.zeros(3)
    retired.add([tensor], mark)
    return weakref.ref(tensor)


def test_memory_is_kept_until_its_event_has_completed_in_order() -> None:
    retired, marks = Retired(), [Mark(), Mark(), Mark()]
    kept = [retire(retired, mark) for mark in marks]

    retired.let_go()
    assert all(each() is not None for each in kept)
    marks[0].completed = marks[2].completed = True
    retired.let_go()
    assert [each() is not None for each in kept] == [False, True, True]
    marks[1].completed = True
    retired.let_go()
    assert not any(each() is not None for each in kept)


def test_in_the_end_nothing_is_kept() -> None:
    retired = Retired()
    kept = [retire(retired, Mark()), retire(retired, Mark(completed=True))]
    retired.add([torch.zeros(1)], HostEvents().record())

    retired.end()
    retired.let_go()

    assert not any(each() is not None for each in kept)


@pytest.mark.parametrize("in_the_end", [True, False])
def test_nor_is_what_the_frames_of_an_error_still_hold(in_the_end: bool) -> None:
    retired, mark, held = Retired(), Mark(), [torch.zeros(3)]
    tensor = weakref.ref(held[0])
    retired.add(held, mark)
    retired.let_go()
    assert tensor() is not None

    mark.completed = True
    if in_the_end:
        retired.end()
    else:
        retired.let_go()

    assert tensor() is None and held == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("keeps", [True, False])
def test_memory_that_another_stream_still_reads_is_not_filled_anew(keeps: bool) -> None:
    """Without it being kept, it is."""
    events, retired = events_of("cuda"), Retired()
    reader = torch.cuda.Stream()
    read = torch.zeros(1 << 20, device="cuda")
    with events.stream():
        filled = torch.full((1 << 20,), 7.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(reader):
        torch.cuda._sleep(600_000_000)
        read.copy_(filled)
        mark = events.record()
    where = filled.data_ptr()
    if keeps:
        retired.add([filled], mark)
    del filled
    retired.let_go()
    with events.stream():
        anew = torch.full((1 << 20,), 8.0, device="cuda")
    torch.cuda.synchronize()

    assert (anew.data_ptr() == where) == (not keeps)
    assert bool(read.eq(7 if keeps else 8).all())
    retired.let_go()
    with events.stream():
        assert not keeps or torch.empty(1 << 20, device="cuda").data_ptr() == where
