"""A trainer rank in a process of its own, which hosts the rendezvous, and a worker of it here."""

import secrets
import threading
from collections.abc import Collection, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from rdt_plan import ConsumerId, DirectRule, Manifest, build_plan
from rdt_transport.consumer import Consumer
from rdt_transport.events import Event, Events, HostEvents, events_of
from rdt_transport.producer import Producer
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import JobSettings, RendezvousAddress, RendezvousClient, host_local
from rdt_transport.testing.fleet import Sink
from rdt_transport.testing.object_process import ObjectProcess
from rdt_transport.testing.sample_job import draw, shards, stable_tensors
from rdt_transport.wire.nixl import NixlWire

__all__ = ["TrainerProcess", "busy", "worker_of"]

_SECONDS = 60.0
_BUSY_SIZE = 4096


def busy(device: torch.device | str, rounds: int) -> None:
    """Enqueue products of large matrices on the current stream: on a GPU they take some hundred
    microseconds each, and this returns at once."""
    matrix = torch.zeros(_BUSY_SIZE if rounds else 0, _BUSY_SIZE, device=device)
    for _ in range(rounds):
        torch.mm(matrix, matrix)


class _Hasty:
    """Events of a publisher whose work counts as done as soon as it is enqueued: a mutant."""

    def __init__(self, events: Events) -> None:
        self._events, self.device = events, events.device
        self._publisher = threading.current_thread()

    def record(self) -> Event:
        publishes = threading.current_thread() is self._publisher
        return HostEvents().record() if publishes else self._events.record()

    def wait(self, event: Event) -> None:
        return None

    def stream(self) -> AbstractContextManager[None]:
        return self._events.stream()

    def bind(self) -> None:
        self._events.bind()

    def bind_with_stream(self) -> None:
        self._events.bind_with_stream()


class _Trainer:
    """Rank 0 of 1."""

    def __init__(
        self,
        producer: Producer,
        client: RendezvousClient,
        manifest: Manifest,
        weights: dict[str, torch.Tensor],
        device: str,
    ) -> None:
        self._producer = producer
        self._client = client
        self._manifest = manifest
        self._weights = weights
        self._device = device
        self._events = events_of(device)

    def address(self) -> RendezvousAddress:
        return self._client.address

    def hurry(self) -> None:
        """Break the producer: see `_Hasty`."""
        self._producer._events = _Hasty(self._events)

    def sync(self, epoch: int, seed: int, gather_rounds: int = 0) -> None:
        """One epoch of ``draw(manifest, seed)``, gathered behind `busy` on a stream of its own; the
        tensors change as soon as `Producer.finish` has returned."""
        drawn = draw(self._manifest, seed)
        fresh = {name: tensor.to(self._device) for name, tensor in drawn.items()}
        self._producer.begin(self._client.begin(0, epoch, _SECONDS))
        with self._events.stream():
            busy(self._device, gather_rounds)
            for group in self._producer.groups:
                names = self._manifest.groups[group].names
                tensors = {name: self._weights[name].copy_(fresh[name]) for name in names}
                self._producer.publish(group, tensors, _SECONDS)
            self._producer.finish(_SECONDS)
            for tensor in self._weights.values():
                tensor.view(torch.uint8).fill_(0xAB)


@contextmanager
def _trainer(
    manifest: Manifest, settings: JobSettings, device: str, stable: Collection[str] | None
) -> Generator[_Trainer]:
    weights = stable_tensors(manifest, 0, device=device)
    names = weights if stable is None else stable
    events_of(device).bind()
    late: list[Producer] = []
    with ExitStack() as cleanup:
        host = host_local("trainer", secrets.token_hex(16), settings)
        cleanup.callback(host.close)
        client = RendezvousClient(host.address, on_event=lambda event: late[0].on_event(event))
        cleanup.callback(client.close)
        progress = ProgressThread(lambda: NixlWire("trainer"), name="trainer", device=device)
        cleanup.callback(progress.close)
        producer = Producer(
            progress,
            client,
            rank=0,
            manifest=manifest,
            settings=settings,
            device=device,
            sources={name: weights[name] for name in names},
        )
        late.append(producer)
        cleanup.callback(producer.close)
        producer.open(_SECONDS)
        yield _Trainer(producer, client, manifest, weights, device)


class TrainerProcess(ObjectProcess):
    """A spawned process with a trainer; it can be asked: address, hurry, sync.

    Args:
        manifest: held by rank 0.
        settings: the job's, of one producer.
        device: where its tensors live.
        stable: names whose tensors are stable; None: all.
    """

    def __init__(
        self,
        manifest: Manifest,
        settings: JobSettings,
        device: str = "cpu",
        stable: Collection[str] | None = None,
    ) -> None:
        super().__init__(_trainer, manifest, settings, device, stable)


@contextmanager
def worker_of(
    trainer: TrainerProcess,
    manifest: Manifest,
    settings: JobSettings,
    sink: Sink,
    device: str = "cpu",
) -> Generator[tuple[Consumer, RendezvousClient]]:
    """A worker that pulls the whole model, directly where the trainer's tensors are stable."""
    late: list[Consumer] = []
    with ExitStack() as cleanup:
        client = RendezvousClient(
            trainer.ask("address"), on_event=lambda event: late[0].on_event(event) if late else None
        )
        cleanup.callback(client.close)
        progress = ProgressThread(lambda: NixlWire("worker"), name="worker", device=device)
        cleanup.callback(progress.close)
        plan = build_plan(
            manifest,
            shards(manifest, 0, 1),
            ConsumerId(0, 0),
            num_workers=1,
            num_slots=settings.num_slots,
            max_chunk_bytes=settings.chunk_bytes,
            direct=DirectRule.of(manifest, client.job(_SECONDS).producers, sink.destinations),
        )
        consumer = Consumer(
            progress,
            client,
            plan=plan,
            num_workers=1,
            on_chunk=lambda chunk, packed: sink.put(late[0], chunk, packed),
            device=device,
            destinations=lambda module, param: sink.destinations[module, param],
        )
        late.append(consumer)
        cleanup.callback(consumer.close)
        consumer.attach(_SECONDS)
        yield consumer, client
