"""An inference deployment without an inference engine: plain tensors behind real consumers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import torch

from rdt_plan import (
    Chunk,
    ConsumerId,
    DirectRule,
    Manifest,
    ParamMeta,
    Placement,
    ProducerRecord,
    build_plan,
    canonical,
    contiguous_stride,
    decode_manifest,
)
from rdt_trainer.client import PauseMode
from rdt_trainer.errors import ClientError
from rdt_transport.consumer import Consumer
from rdt_transport.errors import RendezvousError, SyncAbortedError
from rdt_transport.events import events_of
from rdt_transport.pack import torch_dtype
from rdt_transport.progress import ProgressThread
from rdt_transport.pulling import SyncStats
from rdt_transport.rendezvous import (
    ConnectionLost,
    RendezvousAddress,
    RendezvousClient,
    RendezvousEvent,
)
from rdt_transport.testing.fleet import Sink
from rdt_transport.wire.base import Wire

__all__ = ["TorchEngineClient"]


class TorchEngineClient:
    """A `Client` whose workers live in this process, each with a wire of its own.

    Tensors whose first dim the workers divide are sharded along it, others are whole on each.

    Args:
        make_wire: makes the wire of one worker, called with its role.
        num_workers: workers of this deployment.
        before_scatter: called with worker and chunk before each is installed; may raise.
        ignores: names that its workers do not read, as loaders skip what they do not know.
        direct: read into the workers' tensors directly what the trainer's stable tensors allow.
        device: where the workers' tensors and slots are.
        timeout_seconds: of each wait.

    Attributes:
        workers: by worker, its tensors by name; filled by `init`.
        weight_version: what the last `finish` was given.
        calls: the methods called, in order.
    """

    def __init__(
        self,
        make_wire: Callable[[str], Wire],
        *,
        num_workers: int = 1,
        before_scatter: Callable[[int, Chunk], None] | None = None,
        ignores: Collection[str] = (),
        direct: bool = True,
        device: str = "cpu",
        timeout_seconds: float = 20.0,
    ) -> None:
        self.name = "torch engine"
        self.workers: list[dict[str, torch.Tensor]] = []
        self.weight_version: str | None = None
        self.calls: list[str] = []
        self._make_wire = make_wire
        self._num_workers = num_workers
        self._before_scatter = before_scatter
        self._ignores = frozenset(ignores)
        self._direct = direct
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._cleanup = ExitStack()
        self._consumers: dict[int, Consumer] = {}
        self._clients: dict[int, RendezvousClient] = {}
        self._stats: dict[int, SyncStats] = {}
        self._epoch = 0

    def init(self, init_info: Mapping[str, Any]) -> None:
        """Attach all workers, anew if they were attached before."""
        self.calls.append("init")
        self.close()
        self.workers = [{} for _ in range(self._num_workers)]
        address = RendezvousAddress.from_init_info(init_info)
        try:
            self._each(lambda worker: self._attach(worker, int(init_info["replica"]), address))
        except Exception:
            self.close()
            raise

    def start(self) -> None:
        self.calls.append("start")

    def update(self, update_info: Mapping[str, Any]) -> None:
        """Start pulling on every worker; returns at once."""
        self.calls.append("update")
        self._epoch = int(update_info["epoch"])
        self._each(lambda worker: self._start(worker, self._epoch))

    def finish(self, weight_version: str | None = None) -> None:
        """Return when every worker has installed and committed the epoch."""
        self.calls.append("finish")
        self._each(self._finish)
        self.weight_version = weight_version

    def pause(self, mode: PauseMode = "abort") -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.close()

    def close(self) -> None:
        """Leave the job; idempotent."""
        for client in self._clients.values():
            with suppress(RendezvousError):
                client.leave()
        self.kill()

    def kill(self) -> None:
        """Leave the job without a word, as processes that die do."""
        self._consumers, self._clients = {}, {}
        self._cleanup.close()

    def bytes_pulled(self) -> tuple[int, int]:
        """What all workers read in the last epoch: directly, and through slots."""
        stats = self._stats.values()
        return sum(s.bytes_direct for s in stats), sum(s.bytes_staged for s in stats)

    def shard(self, worker: int, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor that ``worker`` holds: rows, or all of it."""
        if tensor.ndim and tensor.shape[0] % self._num_workers == 0:
            return tensor.tensor_split(self._num_workers)[worker]
        return tensor

    def _each(self, function: Callable[[int], None]) -> None:
        """Call ``function`` with every worker at once, as they are processes of their own."""
        with ThreadPoolExecutor(self._num_workers) as pool:
            calls = [pool.submit(function, worker) for worker in range(self._num_workers)]
        errors = [error for call in calls if (error := call.exception()) is not None]
        if errors:
            text = "; ".join(f"{type(error).__name__}: {error}" for error in errors)
            raise ClientError(f"{self.name}: {text}", server_text=text) from errors[0]

    def _attach(self, worker: int, replica: int, address: RendezvousAddress) -> None:
        late: list[Consumer] = []

        def on_event(event: RendezvousEvent) -> None:
            for consumer in late:
                consumer.on_event(event)
                if isinstance(event, ConnectionLost):
                    consumer.fail(SyncAbortedError(f"the rendezvous is gone: {event.reason}"))

        client = RendezvousClient(address, on_event=on_event)
        self._cleanup.callback(client.close)
        job = client.job(self._timeout_seconds)
        manifest = decode_manifest(job.manifest)
        plan = build_plan(
            manifest,
            [self._place(worker, p) for p in manifest.params if p.name not in self._ignores],
            ConsumerId(replica, worker),
            num_workers=self._num_workers,
            num_slots=job.num_slots,
            max_chunk_bytes=job.max_chunk_bytes,
            direct=self._rule(worker, manifest, job.producers) if self._direct else None,
        )
        sink = Sink(
            {_place_of(name): tensor for name, tensor in self.workers[worker].items()},
            before=lambda chunk: self._scatter(worker, chunk),
            events=events_of(self._device),
        )
        self._cleanup.callback(sink.close)
        progress = ProgressThread(
            lambda: self._make_wire(f"worker{worker}"),
            name=f"worker{replica}.{worker}",
            device=self._device,
        )
        self._cleanup.callback(progress.close)
        consumer = Consumer(
            progress,
            client,
            plan=plan,
            num_workers=self._num_workers,
            device=self._device,
            destinations=lambda *place: self.workers[worker][".".join(filter(None, place))],
            on_chunk=lambda chunk, packed: sink.put(late[0], chunk, packed),
        )
        late.append(consumer)
        self._cleanup.callback(consumer.close)
        consumer.attach(self._timeout_seconds)
        self._clients[worker], self._consumers[worker] = client, consumer

    def _rule(
        self, worker: int, manifest: Manifest, producers: Sequence[ProducerRecord]
    ) -> DirectRule:
        return DirectRule.of(manifest, producers, map(_place_of, self.workers[worker]))

    def _place(self, worker: int, param: ParamMeta) -> Placement:
        whole = torch.empty(param.shape, dtype=torch_dtype(param.dtype))
        part = self.shard(worker, whole)
        self.workers[worker][param.name] = torch.zeros_like(part, device=self._device)
        shape = tuple(part.shape)
        stride = contiguous_stride(shape)
        source = canonical(param.name, param.dtype, int(part.storage_offset()), shape, stride)
        return Placement(source, *_place_of(param.name), 0, shape, stride, param.dtype, stride)

    def _scatter(self, worker: int, chunk: Chunk) -> None:
        if self._before_scatter is not None:
            self._before_scatter(worker, chunk)

    def _start(self, worker: int, epoch: int) -> None:
        consumer, client = self._consumers[worker], self._clients[worker]
        if consumer.is_busy():  # of an epoch whose finish() was never called, or failed elsewhere
            consumer.abort(SyncAbortedError(f"epoch {epoch} starts"))
        consumer.start(client.epoch_record(self._timeout_seconds, epoch))
        try:
            client.epoch_record(self._timeout_seconds, epoch)  # it may have failed meanwhile
        except RendezvousError as error:
            consumer.abort(error)
            raise

    def _finish(self, worker: int) -> None:
        consumer, client = self._consumers[worker], self._clients[worker]
        try:
            self._stats[worker] = consumer.wait(self._timeout_seconds)
        except Exception as error:
            with suppress(RendezvousError):
                client.drop(
                    consumer.plan.consumer,
                    consumer.incarnation.hex(),
                    str(error),
                    epoch=self._epoch,
                )
            raise
        consumer.commit(self._timeout_seconds)


def _place_of(name: str) -> tuple[str, str]:
    """Module and attribute of a tensor."""
    module, _, attribute = name.rpartition(".")
    return module, attribute
