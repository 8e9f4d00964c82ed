"""A whole job in one process: a real rendezvous, producers and consumers with real sessions.

Only the engine is missing: `Sink` copies every chunk where the plan says, into plain tensors.
"""

import queue
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType

import torch

from rdt_plan import Box, Chunk, ConsumerId, DirectRule, Manifest, Write, build_plan
from rdt_plan.records import EpochRecord
from rdt_transport.consumer import Consumer
from rdt_transport.errors import SyncTimeoutError
from rdt_transport.events import Events, HostEvents
from rdt_transport.pack import torch_dtype
from rdt_transport.producer import Producer
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import JobSettings, RendezvousClient, RendezvousEvent, host_local
from rdt_transport.wire.base import Wire

__all__ = ["Destinations", "Fleet", "Sink", "piece"]

_CLOSE_TIMEOUT_SECONDS = 30.0

Destinations = Mapping[tuple[str, str], torch.Tensor]


def piece(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """What the holder of ``box`` has of the full ``tensor``: a view."""
    spans = zip(box.start, box.shape, strict=True)
    return tensor[tuple(slice(start, start + extent) for start, extent in spans)]


class Sink:
    """Scatters chunks on a thread of its own, as an installer does.

    Args:
        destinations: by (module, param); contiguous tensors.
        before: called with each chunk before its copies, on the thread and stream of the sink; may
            raise.
        events: of the destinations' device; None: the CPU.
    """

    def __init__(
        self,
        destinations: Destinations,
        before: Callable[[Chunk], None] | None = None,
        events: Events | None = None,
    ) -> None:
        self.destinations = destinations
        self.before = before
        self._events: Events = HostEvents() if events is None else events
        self._chunks: queue.SimpleQueue[tuple[Consumer, Chunk, torch.Tensor] | None]
        self._chunks = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="rdt-sink", daemon=True)
        self._thread.start()

    def put(self, consumer: Consumer, chunk: Chunk, packed: torch.Tensor) -> None:
        """Queue one landed chunk (any thread)."""
        self._chunks.put((consumer, chunk, packed))

    def close(self) -> None:
        """Scatter what is queued, then end the thread; `SyncTimeoutError` when it does not."""
        self._chunks.put(None)
        self._thread.join(_CLOSE_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            raise SyncTimeoutError(
                f"a sink has not ended within {_CLOSE_TIMEOUT_SECONDS:g} s of its close: its "
                "``before`` may still run"
            )

    def _loop(self) -> None:
        while (item := self._chunks.get()) is not None:
            consumer, chunk, packed = item
            try:
                with self._events.stream():
                    if self.before is not None:
                        self.before(chunk)
                    self._scatter(chunk, packed)
                    event = self._events.record()
            except Exception as error:
                consumer.scatter_failed(chunk.index, error)
            else:
                consumer.scattered(chunk.index, event)

    def _scatter(self, chunk: Chunk, packed: torch.Tensor) -> None:
        starts = dict(zip(chunk.serve.slices, chunk.serve.offsets, strict=True))
        for place in chunk.placements:
            region, start = place.slice, starts[place.slice]
            source = packed[start : start + region.num_bytes].view(torch_dtype(region.dtype))
            target = self.destinations[place.module, place.param].view(-1)
            target = target.view(torch_dtype(place.dtype))
            target.as_strided(place.shape, place.stride, place.offset).copy_(
                source.as_strided(place.shape, place.source_stride, source.storage_offset())
            )


class Fleet:
    """Opens the job on ``with``: every producer published, every consumer attached and ready.

    Args:
        make_wire: makes the wire of one process's role.
        manifest: what the producers hold.
        writes: by consumer: what its loaders would do.
        sinks: by consumer: where its chunks go.
        settings: the job's; its ``num_producers`` producers are made.
        replicas: workers of each replica, whose consumers follow each other; None: one replica.
        sources: by rank, its stable tensors, which `publish` copies weights into; none left out.
        live: destinations that may be read into directly; None: all.
        timeout_seconds: of every wait.
    """

    def __init__(
        self,
        make_wire: Callable[[str], Wire],
        manifest: Manifest,
        writes: Sequence[Sequence[Write]],
        sinks: Sequence[Sink],
        *,
        settings: JobSettings,
        replicas: Sequence[int] | None = None,
        sources: Sequence[Mapping[str, torch.Tensor]] | None = None,
        live: Collection[tuple[str, str]] | None = None,
        max_direct_bytes: int = 1 << 30,
        timeout_seconds: float = 20.0,
    ) -> None:
        self.manifest = manifest
        self.settings = settings
        self.sinks = sinks
        self.timeout_seconds = timeout_seconds
        self.at_once = False  # whether `publish` sends standing groups together
        self.producers: list[Producer] = []
        self.consumers: list[Consumer] = []
        self.clients: list[RendezvousClient] = []
        self._make_wire = make_wire
        self._writes = writes
        self.sources = sources or [{}] * settings.num_producers
        self._live = live
        self._max_direct_bytes = max_direct_bytes
        self._sizes = [len(writes)] if replicas is None else replicas
        self._cleanup = ExitStack()
        self._epoch = 0

    def __enter__(self) -> "Fleet":
        try:
            self._open()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cleanup.close()

    def _open(self) -> None:
        self.host = host_local("fleet", secrets.token_hex(16), self.settings)
        self._cleanup.callback(self.host.close)
        for rank in range(self.settings.num_producers):
            self.producers.append(self._producer(rank))
        for index in range(len(self._writes)):
            self.attach(index)

    def _client(self, on_event: Callable[[RendezvousEvent], None]) -> RendezvousClient:
        client = RendezvousClient(self.host.address, on_event=on_event)
        self._cleanup.callback(client.close)
        self.clients.append(client)
        return client

    def _progress(self, role: str) -> ProgressThread:
        progress = ProgressThread(lambda: self._make_wire(role), name=role)
        self._cleanup.callback(progress.close)
        return progress

    def _producer(self, rank: int) -> Producer:
        late: list[Producer] = []
        progress = self._progress(f"producer{rank}")
        client = self._client(lambda event: late[0].on_event(event))
        producer = Producer(
            progress,
            client,
            rank=rank,
            manifest=self.manifest,
            settings=self.settings,
            sources=self.sources[rank],
        )
        late.append(producer)
        self._cleanup.callback(producer.close)
        producer.open(self.timeout_seconds)
        return producer

    def identity(self, index: int) -> tuple[ConsumerId, int]:
        """Who consumer ``index`` is, and the number of its replica's workers."""
        ids = [
            (ConsumerId(replica, worker), size)
            for replica, size in enumerate(self._sizes)
            for worker in range(size)
        ]
        return ids[index]

    def attach(self, index: int) -> Consumer:
        """Attach consumer ``index`` (again): a new incarnation, wire and client."""
        who, num_workers = self.identity(index)
        late: list[Consumer] = []
        progress = self._progress(f"consumer{index}")
        client = self._client(lambda event: late[0].on_event(event) if late else None)
        job = client.job(self.timeout_seconds)
        sink = self.sinks[index]
        live = sink.destinations if self._live is None else self._live
        plan = build_plan(
            self.manifest,
            self._writes[index],
            who,
            num_workers=num_workers,
            num_slots=self.settings.num_slots,
            max_chunk_bytes=self.settings.chunk_bytes,
            direct=DirectRule.of(self.manifest, job.producers, live),
            max_direct_bytes=self._max_direct_bytes,
        )
        consumer = Consumer(
            progress,
            client,
            plan=plan,
            num_workers=num_workers,
            on_chunk=lambda chunk, packed: sink.put(late[0], chunk, packed),
            destinations=lambda module, param: sink.destinations[module, param],
        )
        late.append(consumer)
        self._cleanup.callback(consumer.close)
        consumer.attach(self.timeout_seconds)
        self.consumers[index : index + 1] = [consumer]
        return consumer

    def begin(self) -> EpochRecord:
        """Begin the next epoch on every producer, and start every consumer that is live in it."""
        self._epoch += 1
        records = [
            client.begin(rank, self._epoch, self.timeout_seconds)
            for rank, client in enumerate(self.clients[: len(self.producers)])
        ]
        for producer, record in zip(self.producers, records, strict=True):
            producer.begin(record)
        for consumer in self.consumers:
            if (consumer.plan.consumer, consumer.incarnation.hex()) in records[0].live:
                consumer.start(records[0])
        return records[0]

    def publish(self, rank: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Publish every group of producer ``rank``: its pieces of full tensors by name."""
        producer = self.producers[rank]
        groups = list(producer.groups)
        while groups:
            if self.at_once:
                for name, stable in self.sources[rank].items():
                    if (box := self.manifest.param(name).box(rank)) is not None:
                        stable.copy_(piece(weights[name], box))
                del groups[: producer.publish_standing(self.sources[rank])]
                if not groups:
                    break
            group = groups.pop(0)
            names = self.manifest.groups[group].names
            boxes = {name: self.manifest.param(name).box(rank) for name in names}
            pieces = {name: piece(weights[name], box) for name, box in boxes.items() if box}
            pieces |= {
                name: stable.copy_(pieces[name])
                for name, stable in self.sources[rank].items()
                if name in pieces
            }
            producer.wait_for_credit(self.timeout_seconds)
            producer.publish(group, pieces, self.timeout_seconds)

    def sync(self, weights: Mapping[str, torch.Tensor]) -> None:
        """One whole epoch of every consumer: begin, publish, install, commit."""
        self.begin()
        self.finish(weights, self.consumers)

    def finish(self, weights: Mapping[str, torch.Tensor], consumers: Sequence[Consumer]) -> None:
        """All that follows a `begin`, for the producers and these consumers."""
        ranks = range(len(self.producers))
        with ThreadPoolExecutor(max(len(ranks), len(consumers))) as pool:
            list(pool.map(lambda rank: self.publish(rank, weights), ranks))
            for producer in self.producers:
                producer.finish(self.timeout_seconds)
            for consumer in consumers:
                consumer.wait(self.timeout_seconds)
            list(pool.map(lambda each: each.commit(self.timeout_seconds), consumers))
