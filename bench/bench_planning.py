"""What planning costs each party of a large job, against reading the manifest once.

Run with `hatch run bench-planning`. A published model's names (Kimi-K2: 69,975), a trainer of 256
ranks (`bench.large_fleet`: experts whole or in shards, the rest on 32 ranks of its stage), 16
replicas of 8 workers. The rendezvous, one trainer rank and one worker each have a process of their
own and do all they do from their first step until the worker is attached: over real sockets, with
the code of the product, but without a wire and without memory for rings. Everybody else is a crowd
in one more process.

A ratio is the CPU time of that party's process over that of decoding the same manifest and taking
its digest, which is part of what the rank and the worker do. `slowest_ratio` is the largest.

A second table says how many bytes the rendezvous keeps, for half the layers, all, and for twice the
consumers.
"""

import asyncio
import gc
import json
import multiprocessing
import os
import queue
import secrets
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.child import follow_parent, in_fork
from bench.crowd import SECONDS, consumers, incarnation, producers
from bench.large_fleet import NUM_RANKS, NUM_WORKERS, held_by_names, held_in_shards, writes_of
from bench.published_sizes import PUBLISHED_SIZES, DeepseekV3
from rdt_plan import (
    WIRE_VERSION,
    ConsumerId,
    DirectRule,
    Manifest,
    Offer,
    ParamMeta,
    Placement,
    ProducerRecord,
    SourceRegion,
    Subscription,
    SyncPlan,
    build_plan,
    decode_manifest,
    encode_manifest,
    rank_schedule,
)
from rdt_plan.collector import collector_paused
from rdt_plan.records import Sources
from rdt_transport.attachment import _sources
from rdt_transport.memory import Arena
from rdt_transport.peers import Peers
from rdt_transport.rendezvous import (
    JobSettings,
    RendezvousAddress,
    RendezvousClient,
    Subscribed,
    host_local,
)
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.packing import pack
from rdt_transport.rendezvous.sealed import SealedOffer, SealedSubscription
from rdt_transport.rendezvous.state import JobState
from rdt_transport.serve_rings import ServeRings
from rdt_transport.testing.held_bytes import held_bytes
from rdt_transport.wire.base import PeerAddress

TARGET = 3.0
HELD = {"names": held_by_names, "shards": held_in_shards}
SETTINGS = ("names:tp", "names:ep", "shards:tp", "shards:ep")
METADATA = secrets.token_bytes(1500)  # about what NIXL's agent says of itself, and a few ranges
RANK = 0
WORKER = ConsumerId(0, 1)

Steps = dict[str, float]
"""CPU seconds of a process, by what it did."""


@dataclass(frozen=True)
class Job:
    """What the job's parties are given.

    `records` are what its ranks publish, `live` the workers' tensors that may be read into.
    """

    params: list[ParamMeta]
    numbers: Mapping[str, int]
    encoded: bytes
    records: list[ProducerRecord]
    writes: dict[int, list[Placement]]
    live: frozenset[tuple[str, str]]
    settings: JobSettings

    @classmethod
    def of(cls, sizes: DeepseekV3, held: str, layout: str, num_replicas: int) -> "Job":
        params = HELD[held](sizes)
        manifest = Manifest.build(params)
        sources: dict[int, list[SourceRegion]] = {rank: [] for rank in range(NUM_RANKS)}
        if held == "shards":
            for number, param in enumerate(params):
                for rank in param.holders:
                    at = (1 << 40) + (len(sources[rank]) << 24)
                    sources[rank].append(SourceRegion(number, at, 0))
        records = [
            ProducerRecord(
                rank=rank,
                incarnation=incarnation(rank),
                wire_name=f"producer-{rank}",
                metadata=METADATA,
                manifest_digest=manifest.digest,
                sources=Sources.of(sources[rank]),
            )
            for rank in range(NUM_RANKS)
        ]
        writes = {w: writes_of(params, sizes, w, layout) for w in range(NUM_WORKERS)}
        live = frozenset((each.module, each.param) for of in writes.values() for each in of)
        settings = JobSettings(NUM_RANKS, num_replicas, lease_seconds=SECONDS)
        encoded = encode_manifest(manifest)
        return cls(params, manifest.numbers, encoded, records, writes, live, settings)

    def plan(
        self, consumer: ConsumerId, manifest: Manifest, records: Sequence[ProducerRecord]
    ) -> SyncPlan:
        return build_plan(
            manifest,
            self.writes[consumer.worker],
            consumer,
            num_workers=NUM_WORKERS,
            num_slots=self.settings.num_slots,
            max_chunk_bytes=self.settings.chunk_bytes,
            direct=DirectRule.of(manifest, records, self.live),
        )

    def subscriptions(self) -> list[Subscription]:
        """Everybody's; equal workers of two replicas share a plan."""
        manifest = decode_manifest(self.encoded)
        plans = [self.plan(ConsumerId(0, w), manifest, self.records) for w in range(NUM_WORKERS)]
        return [
            subscription_of(plans[worker], ConsumerId(replica, worker))
            for replica in range(self.settings.num_replicas)
            for worker in range(NUM_WORKERS)
        ]


def subscription_of(plan: SyncPlan, consumer: ConsumerId) -> Subscription:
    number = NUM_RANKS + consumer.replica * NUM_WORKERS + consumer.worker
    return Subscription(
        consumer=consumer,
        num_workers=NUM_WORKERS,
        incarnation=incarnation(number),
        wire_name=f"consumer-{consumer}",
        metadata=METADATA,
        wire_version=WIRE_VERSION,
        plan_digest=plan.digest,
        tables=tuple(replace(plan.table(owner), consumer=consumer) for owner in plan.owners),
    )


# ---- the parties ---------------------------------------------------------------------------------


class Clock:
    """CPU seconds of this process, by step."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # what was forked is not this party's
        self.steps: Steps = {}
        self._last = time.process_time()

    def tick(self, step: str) -> None:
        now = time.process_time()
        self.steps[step] = self.steps.get(step, 0.0) + now - self._last
        self._last = now


def read_manifest(job: Job) -> float:
    """CPU seconds of decoding the manifest and taking its digest."""
    clock = Clock()
    manifest = decode_manifest(job.encoded)
    assert manifest.digest
    clock.tick("manifest")
    return clock.steps["manifest"]


class Unwired:
    """A progress thread and a wire that carry nothing."""

    def __init__(self) -> None:
        self.peers = Peers()

    def call(self, action: Callable[[Any], Any], timeout_seconds: float) -> Any:
        return action(self)

    def connect(self, peer: PeerAddress, timeout_seconds: float) -> None:
        pass

    def register(self, buffers: Sequence[Any]) -> None:
        pass

    def address(self) -> PeerAddress:
        return PeerAddress(f"producer-{RANK}", METADATA)


class Rings(ServeRings):
    """Rings whose slots have no memory."""

    def _arena(self, table: Any) -> Arena:
        return Arena(table.num_slots, 16)


def serve(job: Job, num_consumers: int, address: RendezvousAddress, stage: "Stage") -> Steps:
    """One trainer rank: describe, publish, admit every consumer and make it an offer."""
    clock = Clock()
    manifest = Manifest.build(job.params)
    assert manifest.digest
    clock.tick("manifest")
    assert rank_schedule(manifest, RANK)
    clock.tick("ownership and schedule")
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    record = job.records[RANK]
    sources = {manifest.names[region.param] for region in record.sources}
    with RendezvousClient(address, on_event=events.put) as client:
        client.publish(record, manifest, SECONDS)
        clock.tick("publish")
        rings = Rings(
            Unwired(),  # type: ignore[arg-type]
            client,
            rank=RANK,
            incarnation=bytes.fromhex(record.incarnation),
            manifest=manifest,
            num_slots=job.settings.num_slots,
            device="cpu",
            gone=frozenset(),
            sources=sources,
        )
        admitted = 0
        while admitted < num_consumers:
            event = events.get(timeout=SECONDS)
            if not isinstance(event, Subscribed):
                raise SystemExit(f"the rank was told {event}")
            rings.admit(event.subscription)
            admitted += 1
            if events.empty():
                rings.make_offers()
        rings.make_offers()
        clock.tick("admit")
        stage.end()
    return clock.steps


def attach(job: Job, address: RendezvousAddress, stage: "Stage") -> Steps:
    """One worker: read the job, plan, subscribe, take the offers."""
    clock = Clock()
    with RendezvousClient(address) as client:
        gc.unfreeze()  # a worker's process has nothing frozen
        with collector_paused(stays=True):  # as the engine's adapter does
            plan = _attach(job, client, clock)  # which the engine keeps
        gc.collect(0)
        clock.tick("collector")
        assert plan.chunks
        stage.end()
    return clock.steps


def _attach(job: Job, client: RendezvousClient, clock: Clock) -> SyncPlan:
    record = client.job(SECONDS)
    clock.tick("job")
    manifest = decode_manifest(record.manifest)
    assert manifest.digest
    client.know(manifest)
    clock.tick("manifest")
    plan = job.plan(WORKER, manifest, record.producers)
    clock.tick("plan")
    assert plan.digest
    clock.tick("digest")
    client.subscribe(subscription_of(plan, WORKER), SECONDS)
    clock.tick("subscribe")
    offers = client.offers(WORKER, SECONDS)
    assert len(offers) == len(plan.owners)
    client.ready(WORKER, incarnation(NUM_RANKS + WORKER.worker))
    if any(chunk.is_direct for chunk in plan.chunks):
        known = {offer.rank: offer for offer in offers}
        assert _sources(client.job(SECONDS), client.numbers(), plan, known)
    clock.tick("offers")
    return plan


async def _be_crowd(
    job: Job,
    address: RendezvousAddress,
    subscriptions: Sequence[Subscription],
    stage: "Stage",
) -> None:
    served = Counter(table.owner for each in subscriptions for table in each.tables)
    others = [record for record in job.records if record.rank != RANK]
    numbers = [served[record.rank] for record in others]
    mine = [each for each in subscriptions if each.consumer != WORKER]
    ranks = await producers(address, others, job.encoded, numbers)
    workers = await consumers(address, mine, job.numbers)
    await asyncio.to_thread(stage.end)  # its producers go on serving
    for peer in (*ranks, *workers):
        peer.close()


# ---- processes -----------------------------------------------------------------------------------


class Stage:
    """Where all parties stay until the last has done its part: whoever goes is lost to the rest."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._done, self._over = context.Semaphore(0), context.Event()

    def end(self) -> None:
        """A party has done its part."""
        self._done.release()
        self._over.wait(SECONDS)

    def wait_for(self, num_parties: int) -> None:
        for _ in range(num_parties):
            if not self._done.acquire(timeout=SECONDS):
                raise TimeoutError(f"a party has not done its part within {SECONDS} s")

    def close(self) -> None:
        self._over.set()


class Party:
    """A process that ends with this one, and what ``action`` returns there."""

    def __init__(self, action: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._answer, send = context.Pipe(duplex=False)
        parent = os.getpid()

        def run() -> None:
            follow_parent(parent)
            send.send(action())

        self._process = context.Process(target=run)
        self._process.start()
        send.close()

    def result(self) -> Any:
        if not self._answer.poll(SECONDS):
            raise TimeoutError(f"a party has not ended after {SECONDS} s")
        found = self._answer.recv()
        self._process.join(SECONDS)
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def rendezvous(settings: JobSettings) -> Generator[tuple[RendezvousAddress, Callable[[], Steps]]]:
    """A host in a process of its own; what it spent so far is asked for over a pipe."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> Steps:
        host = host_local("bench", secrets.token_hex(8), settings)
        clock = Clock()
        theirs.send(host.address)
        theirs.recv()
        clock.tick("relay")
        host.close()
        return clock.steps

    party = Party(run)
    try:
        if not ours.poll(SECONDS):
            raise TimeoutError("the rendezvous did not start")

        def spent() -> Steps:
            ours.send(None)
            return party.result()

        yield ours.recv(), spent
    finally:
        party.kill()


@dataclass(frozen=True)
class Found:
    """What one setting gave: CPU seconds of reading the manifest, and of each party by step."""

    num_slices: int
    num_bytes: int
    read_seconds: float
    parties: dict[str, Steps]

    def ratio(self, party: str) -> float:
        return round(sum(self.parties[party].values()) / self.read_seconds, 2)


def measured(sizes: DeepseekV3, setting: str, num_replicas: int) -> Found:
    held, layout = setting.split(":")
    job = Job.of(sizes, held, layout, num_replicas)
    subscriptions = job.subscriptions()
    own = next(each for each in subscriptions if each.consumer == WORKER)
    served = Counter(table.owner for each in subscriptions for table in each.tables)
    gc.collect()
    reads = [in_fork(partial(read_manifest, job)) for _ in range(3)]
    with rendezvous(job.settings) as (address, spent):
        stage = Stage()
        parties = {
            "a trainer rank": Party(partial(serve, job, served[RANK], address, stage)),
            "a worker": Party(partial(attach, job, address, stage)),
        }
        crowd = Party(lambda: asyncio.run(_be_crowd(job, address, subscriptions, stage)))
        try:
            stage.wait_for(3)
            steps = {"the rendezvous": spent()}
            stage.close()
            steps |= {who: party.result() for who, party in parties.items()}
        finally:
            for party in (*parties.values(), crowd):
                party.kill()
    slices = sum(len(chunk.slices) for table in own.tables for chunk in table.chunks)
    return Found(slices, len(job.encoded), median(reads), steps)


# ---- what the rendezvous keeps -------------------------------------------------------------------


def state_bytes(sizes: DeepseekV3, num_replicas: int) -> tuple[int, int]:
    """(names, bytes that the rendezvous' state machine holds once everybody is attached)."""
    job = Job.of(sizes, "shards", "tp", num_replicas)
    state = JobState("bench", job.settings, lambda: uuid.uuid4().hex)
    clients = iter(range(1 << 20))

    def call(request: ask.Request) -> None:
        client = next(clients)
        state.connected(client, 0.0)
        state.request(client, 0, request, SECONDS, 0.0)

    for record in job.records:
        call(ask.Publish(record, pack(job.encoded)))
    for subscription in job.subscriptions():
        sealed = SealedSubscription.seal(subscription, job.numbers)
        call(ask.Subscribe(sealed, None))
        offers = [
            Offer(
                consumer=subscription.consumer,
                consumer_incarnation=subscription.incarnation,
                rank=table.owner,
                producer_incarnation=incarnation(table.owner),
                wire_name=f"producer-{table.owner}",
                metadata=METADATA,
                slots=(),
            )
            for table in subscription.tables
        ]
        call(ask.MakeOffers(tuple(map(SealedOffer.seal, offers))))
    return len(job.params), held_bytes(state)


def main(
    model: Annotated[str, typer.Option(help="whose names")] = "kimi-k2",
    settings: Annotated[str, typer.Option(help="which, by commas")] = ",".join(SETTINGS),
    replicas: Annotated[int, typer.Option(min=1, help="of 8 workers each")] = 16,
    layers: Annotated[int, typer.Option(min=0, help="of the model; 0 is all")] = 0,
) -> None:
    """Print what planning costs each party, and one JSON line of all ratios."""
    published = PUBLISHED_SIZES.get(model)
    if not isinstance(published, DeepseekV3):
        raise typer.BadParameter(f"no model {model!r} with latent attention: try kimi-k2")
    sizes = replace(published, layers=layers or published.layers)
    found = {}
    for setting in settings.split(","):
        found[setting] = in_fork(partial(measured, sizes, setting, replicas))
        print(f"{setting}: {found[setting]}", file=sys.stderr, flush=True)
    table = Table("held by : cut by", "party", "of reading the manifest", "by step")
    ratios: dict[str, dict[str, float]] = {}
    for setting, each in found.items():
        ratios[setting] = {who.split()[-1] + "_ratio": each.ratio(who) for who in each.parties}
        ratios[setting]["slowest_ratio"] = max(ratios[setting].values())
        for who, steps in each.parties.items():
            parts = (f"{step} {s / each.read_seconds:.2f}" for step, s in steps.items())
            table.add_row(setting, who, f"{each.ratio(who):.2f}", ", ".join(parts))
    console = Console(width=120)
    console.print(
        f"{replicas * NUM_WORKERS} consumers, {NUM_RANKS} producers; CPU time of each party's "
        "process over that of decoding the manifest and taking its digest"
    )
    console.print(table)
    for setting, each in found.items():
        who = max(each.parties, key=each.ratio)
        verdict = "met" if each.ratio(who) <= TARGET else "missed"
        console.print(
            f"{setting}: the slowest is {who}, {each.ratio(who)} (target: at most {TARGET:g}, "
            f"{verdict})"
        )
    half = replace(sizes, layers=max(1, sizes.layers // 2))
    kept = Table("names", "consumers", "bytes kept by the rendezvous", "a name")
    per_name = []
    for cut, number in ((half, replicas), (sizes, replicas), (sizes, 2 * replicas)):
        names, num_bytes = in_fork(partial(state_bytes, cut, number))
        per_name.append(num_bytes / names)
        kept.add_row(
            f"{names:,}", str(number * NUM_WORKERS), f"{num_bytes:,}", f"{num_bytes / names:.0f}"
        )
    console.print(kept)
    line = {
        "bench": "planning",
        "models": ratios,
        "state_bytes_a_name_ratio": round(per_name[1] / per_name[0], 2),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    typer.run(main)
