"""Direct chunks through real sessions: bytes compared, and sources that change at once after."""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rdt_plan import Manifest, SliceError
from rdt_transport import consumer as consumer_module
from rdt_transport import stable_sources
from rdt_transport.consumer import Consumer
from rdt_transport.errors import SyncAbortedError, SyncTimeoutError, TornError, WireError
from rdt_transport.events import Event, HostEvents
from rdt_transport.producer import Producer
from rdt_transport.rendezvous import JobSettings
from rdt_transport.testing.fleet import Fleet
from rdt_transport.testing.held_reads import HeldReads
from rdt_transport.testing.sample_job import (
    draw,
    expect_exact,
    in_process,
    model,
    open_fleet,
    stable_tensors,
)
from rdt_transport.testing.wire_pair import MakeWire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

SECONDS = 20.0


def scribble(fleet: Fleet) -> None:
    """What an optimizer may do once `Producer.finish` has returned."""
    for held in fleet.sources:
        for tensor in held.values():
            tensor.view(torch.uint8).fill_(0xAB)


def sync_and_scribble(fleet: Fleet, weights: dict[str, torch.Tensor]) -> None:
    """One epoch of everybody; the sources change before any consumer is asked whether it ended."""
    fleet.begin()
    for rank in range(len(fleet.producers)):
        fleet.publish(rank, weights)
    for producer in fleet.producers:
        producer.finish(SECONDS)
    scribble(fleet)
    for consumer in fleet.consumers:
        consumer.wait(SECONDS)
        consumer.commit(SECONDS)


def sync_threaded(fleet: Fleet, weights: dict[str, torch.Tensor]) -> None:
    """The same where producers wait for each other's consumers: each publishes on its thread."""
    fleet.begin()
    ranks = range(len(fleet.producers))
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda rank: fleet.publish(rank, weights), ranks))
    for producer in fleet.producers:
        producer.finish(SECONDS)
    scribble(fleet)
    for consumer in fleet.consumers:
        consumer.wait(SECONDS)
    with ThreadPoolExecutor(len(fleet.consumers)) as pool:
        list(pool.map(lambda consumer: consumer.commit(SECONDS), fleet.consumers))


@contextmanager
def all_stable(
    make_wire: MakeWire,
    manifest: Manifest,
    job: JobSettings,
    replicas: tuple[int, ...] = (1, 1),
    **more: int,
) -> Iterator[Fleet]:
    sources = [stable_tensors(manifest, rank) for rank in range(job.num_producers)]
    with open_fleet(make_wire, manifest, job, replicas, sources=sources, **more) as fleet:
        yield fleet


def test_direct_chunks_are_exact_each_epoch_and_sources_may_change_after(
    make_wire: MakeWire,
) -> None:
    manifest = model()
    with all_stable(make_wire, manifest, JobSettings(1, 2)) as fleet:
        plan = fleet.consumers[0].plan
        assert plan.chunks and all(chunk.is_direct for chunk in plan.chunks)
        (offer,) = fleet.clients[1].offers(plan.consumer, SECONDS)
        assert offer.slots == ()
        fleet.sinks[0].before = lambda chunk: pytest.fail(f"{chunk} went through a slot")
        for seed in (1, 2, 3):
            weights = draw(manifest, seed)
            sync_and_scribble(fleet, weights)
            expect_exact(fleet, weights)
            stats = fleet.consumers[0].wait(1.0)
            assert (stats.bytes_direct, stats.bytes_staged) == (plan.direct_bytes, 0)
            assert stats.bytes_pulled == plan.bytes_pulled > 0


def test_direct_and_slotted_chunks_mix(make_wire: MakeWire) -> None:
    manifest = model()
    names = {param.name for param in manifest.params if not param.name.endswith("norm")}
    sources = [stable_tensors(manifest, 0, names)]
    job = JobSettings(1, 2, max_chunk_bytes=64)
    live = {("layers.0", "w"), ("layers.1", "b"), ("", "head"), ("layers.2", "norm")}
    with open_fleet(make_wire, manifest, job, (2,), sources=sources, live=live) as fleet:
        seen: list[int] = []
        fleet.sinks[0].before = lambda chunk: seen.append(chunk.index)
        for seed in (1, 2):
            weights = draw(manifest, seed)
            sync_threaded(fleet, weights)
            expect_exact(fleet, weights)
        plan = fleet.consumers[0].plan
        slotted = [chunk.index for chunk in plan.chunks if not chunk.is_direct]
        assert seen == slotted * 2
        assert 0 < len(slotted) < len(plan.chunks)
        stats = fleet.consumers[0].wait(1.0)
        assert (stats.bytes_direct, stats.bytes_staged) == (plan.direct_bytes, plan.staged_bytes)


NAMES = sorted(param.name for param in model(4).params)


@given(
    num_layers=st.integers(1, 4),
    rows=st.sampled_from([2, 4, 10]),
    num_slots=st.integers(1, 3),
    max_chunk_bytes=st.sampled_from([16, 48, 1000]),
    max_direct_bytes=st.sampled_from([8, 100, 1 << 30]),
    lookahead=st.integers(0, 2),
    replicated=st.booleans(),
    replicas=st.sampled_from([(2,), (1, 1), (2, 2)]),
    stable=st.lists(st.sets(st.sampled_from(NAMES)), min_size=2, max_size=2),
    frozen=st.sets(st.sampled_from(NAMES)),
    read_polls=st.sampled_from([0, 1, 7]),
    at_once=st.booleans(),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_mixture_is_exact(
    num_layers: int,
    rows: int,
    num_slots: int,
    max_chunk_bytes: int,
    max_direct_bytes: int,
    lookahead: int,
    replicated: bool,
    replicas: tuple[int, ...],
    stable: list[set[str]],
    frozen: set[str],
    read_polls: int,
    at_once: bool,
) -> None:
    fabric = InProcessFabric(read_polls)
    owners = ((0, 1),) if replicated else ((0,), (1,))
    manifest = model(num_layers, rows, owners)
    job = JobSettings(
        2,
        len(replicas),
        num_slots=num_slots,
        max_chunk_bytes=max_chunk_bytes,
        lookahead=lookahead,
    )
    sources = [stable_tensors(manifest, rank, names) for rank, names in enumerate(stable)]
    places = {tuple(n.rpartition(".")[::2]) for n in NAMES if n not in frozen}
    with open_fleet(
        lambda role: InProcessWire(fabric, role),
        manifest,
        job,
        replicas,
        sources=sources,
        live={(module, param) for module, param in places},
        max_direct_bytes=max_direct_bytes,
    ) as fleet:
        fleet.at_once = at_once
        for seed in (1, 2):
            weights = draw(manifest, seed)
            sync_threaded(fleet, weights)
            expect_exact(fleet, weights)


def finish_while_reads_are_held(manifest: Manifest) -> None:
    """Publish, finish, change the sources at once, and only then let the reads go on, if they may
    have been waited for: exact weights must arrive."""
    reads = HeldReads("consumer0")
    with all_stable(reads, manifest, JobSettings(1), (1,)) as fleet:
        weights = draw(manifest, 1)
        fleet.begin()
        fleet.publish(0, weights)
        assert reads.posted.wait(SECONDS)
        later = threading.Timer(0.2, reads.let_go)
        later.start()
        fleet.producers[0].finish(SECONDS)
        scribble(fleet)
        later.join()
        fleet.consumers[0].wait(SECONDS)
        expect_exact(fleet, weights)


def test_a_source_that_changes_right_after_finish_tears_nothing() -> None:
    finish_while_reads_are_held(model())


def test_without_the_wait_of_finish_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Producer, "finish", lambda self, timeout_seconds: None)
    with pytest.raises(AssertionError, match="the bytes differ"):
        finish_while_reads_are_held(model())


def test_finish_waits_for_direct_reads_and_names_them() -> None:
    reads = HeldReads("consumer0")
    manifest = model()
    with all_stable(reads, manifest, JobSettings(1), (1,)) as fleet:
        fleet.begin()
        fleet.publish(0, draw(manifest, 1))
        assert reads.posted.wait(SECONDS)
        with pytest.raises(SyncTimeoutError, match=r"waited 0\.1 s for consumer r0w0: "):
            fleet.producers[0].finish(0.1)
        reads.let_go()
        fleet.producers[0].finish(SECONDS)


def test_a_dropped_reader_is_waited_for_no_more_and_can_commit_nothing() -> None:
    reads = HeldReads("consumer1")
    manifest = model()
    with all_stable(reads, manifest, JobSettings(1, 2)) as fleet:
        fleet.begin()
        fleet.publish(0, weights := draw(manifest, 1))
        assert reads.posted.wait(SECONDS)
        late = fleet.consumers[1]
        fleet.clients[0].drop(late.plan.consumer, late.incarnation.hex(), "too slow")
        fleet.producers[0].finish(SECONDS)
        scribble(fleet)
        wait_until(late._open_epoch().decided.is_set)  # it was told, too
        reads.let_go()
        fleet.consumers[0].wait(SECONDS)
        fleet.consumers[0].commit(SECONDS)
        expect_exact(fleet, weights, 0)
        with pytest.raises(TornError, match=r"was dropped: .*too slow"):
            late.wait(SECONDS)
        with pytest.raises(TornError):
            late.commit(SECONDS)
        fleet.consumers[1].close()
        fleet.clients[2].leave()
        fleet.attach(1)
        sync_and_scribble(fleet, weights := draw(manifest, 2))
        expect_exact(fleet, weights)


def test_an_abort_with_direct_reads_in_flight_ends_quiesced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = HeldReads("consumer0")
    manifest = model()
    with all_stable(reads, manifest, JobSettings(1), (1,)) as fleet:
        fleet.begin()
        fleet.publish(0, draw(manifest, 1))
        assert reads.posted.wait(SECONDS)
        consumer = fleet.consumers[0]
        monkeypatch.setattr(consumer_module, "ABORT_TIMEOUT_SECONDS", 0.1)
        with pytest.raises(
            SyncTimeoutError, match=r"still in flight 0\.1 s after the abort: chunk"
        ):
            consumer.abort(SyncAbortedError("changed our minds"))
        assert consumer.is_busy()
        reads.let_go()
        monkeypatch.setattr(consumer_module, "ABORT_TIMEOUT_SECONDS", SECONDS)
        consumer.abort(SyncAbortedError("again"))
        assert not consumer.is_busy()
        with pytest.raises(SyncAbortedError, match="changed our minds"):
            consumer.wait(SECONDS)
        fleet.clients[1].fail(1, "changed our minds")
        fleet.producers[0].abort(SyncAbortedError("over"))
        sync_and_scribble(fleet, weights := draw(manifest, 2))
        expect_exact(fleet, weights)


def test_standing_groups_need_no_credit() -> None:
    reads = HeldReads("consumer0")
    manifest = model(num_layers=4)
    with all_stable(reads, manifest, JobSettings(1, lookahead=0), (1,)) as fleet:
        fleet.begin()
        fleet.publish(0, weights := draw(manifest, 1))  # all of it, although nothing is read yet
        reads.let_go()
        fleet.producers[0].finish(SECONDS)
        fleet.consumers[0].wait(SECONDS)
        expect_exact(fleet, weights)


def test_standing_groups_are_published_without_waiting_for_the_progress_thread() -> None:
    manifest = model(num_layers=4)
    with all_stable(in_process(), manifest, JobSettings(1, lookahead=0), (1,)) as fleet:
        fleet.begin()
        busy = threading.Event()
        in_time: list[bool] = []
        fleet.producers[0]._progress.submit(lambda wire: in_time.append(busy.wait(2.0)))
        fleet.publish(0, weights := draw(manifest, 1))
        busy.set()
        fleet.producers[0].finish(SECONDS)
        fleet.consumers[0].wait(SECONDS)
        expect_exact(fleet, weights)
        assert in_time == [True]


def test_standing_groups_are_on_their_way_when_publishing_them_returns() -> None:
    """Also the last one: what the caller does then may keep the interpreter busy."""
    manifest = model(num_layers=4)
    sources = [stable_tensors(manifest, 0)]
    with open_fleet(in_process(), manifest, JobSettings(1), (1,), sources=sources) as fleet:
        producer = fleet.producers[0]
        fleet.begin()
        serving = producer._open_epoch()
        for hold_back in (True, False):
            num_before = serving._num_arrived
            producer._progress.submit(lambda wire: time.sleep(0.05))
            num_groups = producer.publish_standing(sources[0], hold_back=hold_back)
            assert num_groups > 0
            assert serving._num_arrived == num_before + num_groups
        producer.finish(SECONDS)
        fleet.consumers[0].wait(SECONDS)


@pytest.mark.parametrize("is_stable", [True, False])
def test_only_slots_make_a_producer_urgent(is_stable: bool) -> None:
    """What it waits for otherwise is the end, and its own process has better to do than to poll."""
    manifest = model()
    sources = [stable_tensors(manifest, 0)] if is_stable else None
    with open_fleet(in_process(), manifest, JobSettings(1), (1,), sources=sources) as fleet:
        producer = fleet.producers[0]
        assert not producer.is_urgent()
        fleet.begin()
        assert producer.is_busy()
        assert producer.is_urgent() is not is_stable
        fleet.publish(0, draw(manifest, 1))
        producer.finish(SECONDS)
        fleet.consumers[0].wait(SECONDS)


def test_a_group_on_its_way_to_the_progress_thread_takes_its_credit_already() -> None:
    with open_fleet(in_process(), model(), JobSettings(1, lookahead=0), (1,)) as fleet:
        fleet.begin()
        producer = fleet.producers[0]
        serving = producer._open_epoch()
        producer.wait_for_credit(SECONDS)
        serving.spend_credit([0])
        producer._progress.call(lambda wire: serving._perform(wire, []), SECONDS)  # a doorbell, say
        with pytest.raises(SyncTimeoutError):
            producer.wait_for_credit(0.05)


def test_ready_doorbells_that_come_before_the_start_are_all_kept(make_wire: MakeWire) -> None:
    manifest = model(num_layers=4)
    job = JobSettings(1, num_slots=1)
    with all_stable(make_wire, manifest, job, (1,), max_direct_bytes=16) as fleet:
        consumer, weights = fleet.consumers[0], draw(manifest, 1)
        assert len(consumer.plan.chunks) > 10
        record = fleet.clients[0].begin(0, 1, SECONDS)
        fleet.producers[0].begin(record)
        fleet.publish(0, weights)
        kept = lambda: sum(map(len, consumer._mailbox._kept.values()))  # noqa: E731
        wait_until(lambda: kept() == len(consumer.plan.chunks))
        consumer.start(record)
        fleet.producers[0].finish(SECONDS)
        consumer.wait(SECONDS)
        expect_exact(fleet, weights)


def wait_until(condition) -> None:
    ticks = threading.Event()
    for _ in range(int(SECONDS / 0.01)):
        if condition():
            return
        ticks.wait(0.01)
    raise AssertionError("it never came")


class Mark:
    """An event that a test completes."""

    def __init__(self) -> None:
        self.completed = threading.Event()
        self.asked = threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.completed.is_set()


def test_nothing_is_read_before_the_engine_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = model()
    sources = [stable_tensors(manifest, 0, {"embed", "head"})]
    job = JobSettings(1, max_chunk_bytes=64)
    with open_fleet(in_process(), manifest, job, (1,), sources=sources) as fleet:
        mark = Mark()
        monkeypatch.setattr(fleet.consumers[0]._events, "record", lambda: mark)
        fleet.sinks[0].before = lambda chunk: mark.completed.is_set() or pytest.fail("too early")
        fleet.begin()
        publisher = threading.Thread(target=fleet.publish, args=(0, weights := draw(manifest, 1)))
        publisher.start()
        assert mark.asked.wait(SECONDS)
        with pytest.raises(SyncTimeoutError):
            fleet.producers[0].finish(0.3)
        found = fleet.sinks[0].destinations.values()
        assert not any(tensor.any() for tensor in found)
        mark.completed.set()
        publisher.join()
        fleet.producers[0].finish(SECONDS)
        fleet.consumers[0].wait(SECONDS)
        expect_exact(fleet, weights)


def test_an_epoch_that_waits_for_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with all_stable(in_process(), model(), JobSettings(1), (1,)) as fleet:
        monkeypatch.setattr(fleet.consumers[0]._events, "record", Mark)
        fleet.begin()
        reason = r"waited 0\.1 s for what was enqueued on the device before the sync; raise"
        with pytest.raises(SyncTimeoutError, match=reason):
            fleet.consumers[0].wait(0.1)


class Publishers:
    """The events of a producer whose publisher's work ends with ``mark``."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.stream, self.bind_with_stream = HostEvents().stream, HostEvents().bind
        self.device = HostEvents().device
        self.waits: list[object] = []

    def record(self) -> Event:
        packs = threading.current_thread().name.startswith("rdt-serve")
        return HostEvents().record() if packs else self.mark

    def wait(self, event: object) -> None:
        """What a stream does: nothing behind this runs before the event."""
        self.waits.append(event)
        self.mark.asked.set()
        assert self.mark.completed.wait(SECONDS)


@pytest.mark.parametrize("names", [None, ()], ids=["direct", "slotted"])
def test_nothing_is_readable_before_the_publisher_s_work_is_done(names: object) -> None:
    """Direct chunks are not announced before its event; packs are enqueued behind it."""
    manifest = model()
    sources = [stable_tensors(manifest, 0, names)]
    with open_fleet(in_process(), manifest, JobSettings(1), (1,), sources=sources) as fleet:
        producer, consumer = fleet.producers[0], fleet.consumers[0]
        producer._events = events = Publishers(Mark())
        fleet.begin()
        publisher = threading.Thread(target=fleet.publish, args=(0, weights := draw(manifest, 1)))
        publisher.start()
        assert events.mark.asked.wait(SECONDS)
        time.sleep(0.05)
        waiting_for = consumer._open_epoch().waiting_for()
        events.mark.completed.set()
        publisher.join()
        producer.finish(SECONDS)
        consumer.wait(SECONDS)
        expect_exact(fleet, weights)
        assert "READY not received" in waiting_for
        slotted = [chunk for chunk in consumer.plan.chunks if not chunk.is_direct]
        assert events.waits == [events.mark] * len(slotted)


def test_a_stable_tensor_that_was_replaced_is_refused_by_name() -> None:
    manifest = model()
    with all_stable(in_process(), manifest, JobSettings(1), (1,)) as fleet:
        fleet.begin()
        producer, other = fleet.producers[0], torch.zeros(8, 6, dtype=torch.bfloat16)
        reason = r"embed: producer 0 registered torch\.bfloat16\[8, 6\] .*change tensors in place"
        with pytest.raises(SliceError, match=reason):
            producer.publish(0, {"embed": other}, 1.0)
        with pytest.raises(SliceError, match=reason):
            producer.publish(0, {"embed": fleet.sources[0]["embed"][:4]}, 1.0)
        with pytest.raises(SliceError, match=reason):
            producer.publish_standing({**fleet.sources[0], "embed": other})


def test_standing_groups_are_sent_at_once_as_far_as_they_follow_each_other() -> None:
    manifest = model()
    names = {param.name for param in manifest.params if not param.name.startswith("layers.1.")}
    sources = [stable_tensors(manifest, 0, names)]
    job = JobSettings(1, lookahead=0)
    with open_fleet(in_process(), manifest, job, (1,), sources=sources) as fleet:
        producer, weights = fleet.producers[0], draw(manifest, 1)
        fleet.begin()
        for name, stable in sources[0].items():
            stable.copy_(weights[name])
        gap = manifest.group_of("layers.1.w")
        before = producer.groups.index(gap)
        assert producer.publish_standing(sources[0]) == before > 1
        assert producer.publish_standing(sources[0]) == 0  # it is the other one's turn
        others = {name: weights[name] for name in manifest.groups[gap].names}
        producer.publish(gap, others, SECONDS)
        assert producer.publish_standing(sources[0]) == len(producer.groups) - before - 1 > 0
        assert producer.publish_standing(sources[0]) == 0
        producer.finish(SECONDS)
        fleet.consumers[0].wait(SECONDS)
        expect_exact(fleet, weights)


def test_standing_groups_of_an_epoch_that_failed_are_refused() -> None:
    with all_stable(in_process(), model(), JobSettings(1), (1,)) as fleet:
        fleet.begin()
        fleet.producers[0].abort(SyncAbortedError("enough"))
        with pytest.raises(SyncAbortedError, match="enough"):
            fleet.producers[0].publish_standing(fleet.sources[0])


def test_a_destination_that_was_replaced_is_refused_by_name() -> None:
    manifest = model()
    with all_stable(in_process(), manifest, JobSettings(1), (1,)) as fleet:
        record = fleet.clients[0].begin(0, 1, SECONDS)
        places = fleet.sinks[0].destinations
        places["layers.1", "w"] = places["layers.1", "w"].clone()
        with pytest.raises(WireError, match=r"layers\.1\.w was registered as .* initialise the"):
            fleet.consumers[0].start(record)


def test_direct_chunks_without_destinations_are_refused() -> None:
    with all_stable(in_process(), model(), JobSettings(1), (1,)) as fleet:
        plan = fleet.consumers[0].plan
        with pytest.raises(WireError, match=r"reads \d+ tensors directly; give the consumer its"):
            Consumer(None, None, plan=plan, num_workers=1, on_chunk=print)


def test_beyond_the_most_storages_tensors_go_through_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stable_sources, "MAX_SOURCE_REGIONS", 1)
    manifest = model()
    with (
        caplog.at_level(logging.WARNING),
        all_stable(in_process(), manifest, JobSettings(1), (1,)) as fleet,
    ):
        assert "go through slots: at most 1 allocations are registered" in caplog.text
        assert 0 < fleet.consumers[0].plan.direct_bytes < fleet.consumers[0].plan.bytes_pulled
        sync_threaded(fleet, weights := draw(manifest, 1))
        expect_exact(fleet, weights)


def test_intervals_are_kept_when_asked_for() -> None:
    manifest = model()
    sources = [stable_tensors(manifest, 0, {"embed"})]
    with open_fleet(in_process(), manifest, JobSettings(1), (1,), sources=sources) as fleet:
        consumer, producer = fleet.consumers[0], fleet.producers[0]
        fleet.sync(draw(manifest, 1))
        assert consumer.intervals is producer.intervals is None
        consumer.record_intervals(True)
        producer.record_intervals(True)
        for seed in (2, 3):
            fleet.sync(draw(manifest, seed))
            chunks = consumer.plan.chunks
            slotted = [chunk.index for chunk in chunks if not chunk.is_direct]
            kept = {
                stage: sorted(r.chunk for r in consumer.intervals if r.stage == stage)
                for stage in ("ready", "read", "scatter")
            }
            everything = list(range(len(chunks)))
            assert kept == {"ready": everything, "read": everything, "scatter": slotted}
            assert sorted(r.chunk for r in producer.intervals if r.stage == "pack") == slotted
            gathers = [r.chunk for r in producer.intervals if r.stage == "gather"]
            assert gathers == list(producer.groups)
            rows = [*consumer.intervals, *producer.intervals]
            assert all(row.start <= row.end for row in rows)
