"""Events, streams and slots of a GPU."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from rdt_transport.device_memory import is_registrable
from rdt_transport.errors import WireError
from rdt_transport.events import CudaEvents, HostEvents, events_of, free_device_bytes
from rdt_transport.memory import Arena

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SLOW_CYCLES = 600_000_000


@pytest.fixture
def events():
    torch.cuda.synchronize()
    yield events_of("cuda")
    torch.cuda.synchronize()


def test_an_event_completes_with_what_was_enqueued_before_it(events):
    with events.stream():
        torch.cuda._sleep(SLOW_CYCLES)
        event = events.record()
    on_the_other_stream = events.record()

    assert not event.query()
    torch.cuda.current_stream().synchronize()
    assert on_the_other_stream.query()
    torch.cuda.synchronize()
    assert event.query()


def test_waiting_orders_two_streams_without_blocking_the_thread(events):
    source, target = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with events.stream():
        torch.cuda._sleep(SLOW_CYCLES)
        source.fill_(7)
        event = events.record()
    events.wait(event)
    target.copy_(source)
    assert not event.query()
    del event  # goes back to the pool; who waits for it goes on waiting
    reused = events.record()
    torch.cuda.synchronize()

    assert target.eq(7).all()
    assert reused.query()


def test_without_waiting_the_old_value_would_be_read(events):
    source, target = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with events.stream():
        torch.cuda._sleep(SLOW_CYCLES)
        source.fill_(7)
    target.copy_(source)
    torch.cuda.synchronize()

    assert target.eq(0).all()


def test_events_are_pooled_and_an_old_one_answers_for_its_own_record(events):
    first = events.record()
    torch.cuda.synchronize()
    assert first.query()
    mark = first.mark
    torch.cuda._sleep(SLOW_CYCLES)
    second = events.record()
    assert second.mark is not mark
    assert first.query() and not second.query()
    del first
    assert events.record().mark is mark


def test_an_event_of_the_host_needs_no_waiting(events):
    events.wait(HostEvents().record())


def test_every_thread_has_one_stream_of_its_own(events):
    seen = []

    def look():
        events.bind()
        for _ in range(2):
            with events.stream():
                seen.append(torch.cuda.current_stream().cuda_stream)

    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert seen[0] == seen[1] and seen[2] == seen[3] and seen[0] != seen[2]
    assert torch.cuda.current_stream().cuda_stream not in seen


def test_binding_makes_a_thread_use_the_device():
    last = torch.cuda.device_count() - 1
    found = []

    def bind():
        CudaEvents(f"cuda:{last}").bind()
        found.append(torch.cuda.current_device())

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()

    assert found == [last]


def test_a_thread_that_is_bound_with_its_stream_stays_on_it(events):
    source, target = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    marks, seen = [], []

    def work():
        events.bind_with_stream()
        seen.append(torch.cuda.current_stream().cuda_stream)
        with events.stream():
            seen.append(torch.cuda.current_stream().cuda_stream)
            torch.cuda._sleep(SLOW_CYCLES)
            source.fill_(7)
        marks.append(events.record())
        seen.append(torch.cuda.current_stream().cuda_stream)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not marks[0].query()  # it was recorded behind the work
    events.wait(marks[0])
    target.copy_(source)
    torch.cuda.synchronize()

    assert target.eq(7).all()
    assert len(set(seen)) == 1
    assert torch.cuda.current_stream().cuda_stream not in seen


def test_an_arena_lies_on_the_gpu_and_can_be_registered():
    arena = Arena(3, 1000, "cuda")
    for index in range(3):
        arena.slot(index).fill_(index)
        region = arena.region(index)
        assert region.address == arena.slot(index).data_ptr()
        assert region.device == torch.cuda.current_device()
    assert [arena.slot(index).unique().tolist() for index in range(3)] == [[0], [1], [2]]
    assert is_registrable(arena.buffer)


def test_an_arena_without_room_says_what_to_lower():
    free = free_device_bytes("cuda")
    with pytest.raises(WireError, match=r"on cuda, where \d+ bytes are free; lower num_slots or"):
        Arena(2, free, "cuda")


def test_an_arena_in_expandable_segments_is_refused_with_the_remedy():
    script = """
import torch
from rdt_transport.memory import Arena
kept = torch.zeros(1 << 20, device="cuda")
print("expandable:", any(s["is_expandable"] for s in torch.cuda.memory_snapshot()))
Arena(2, 64 << 20, "cuda")
"""
    setting = "expandable_segments:True"
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **dict.fromkeys(names, setting)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    if "expandable: False" in ended.stdout:
        pytest.skip("this host has no expandable segments")
    assert "lie in virtual memory, which cannot be registered; unset expandable_" in ended.stderr


def test_memory_of_the_caching_allocator_can_be_registered():
    assert is_registrable(torch.zeros(100, device="cuda"))
    assert is_registrable(torch.zeros(64 << 20, device="cuda")[5:9])
    assert is_registrable(torch.zeros(5))
