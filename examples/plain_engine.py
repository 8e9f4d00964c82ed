"""A weight sync into an engine that is not vLLM: a model with a loader of its own, in plain torch.

Two processes, over the NIXL wire: a trainer, and an engine whose worker it syncs twice. The loader
*computes*: it folds a scale into the queries, casts, and keeps decays in another form than the
checkpoint. Recorded once, that is a **program**, which the engine runs on the slices it fetched.
After each sync the engine loads the same weights with the loader itself, and compares every byte.

What an engine of one's own needs is section 2, nothing else; how a sync travels is told in
``examples/reference_sync.py``. CPU only, as the product is today.
"""

import multiprocessing
import os
import queue
import secrets
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rdt_bake import PlanReplay, find_tensor, record
from rdt_plan import Chunk, ConsumerId, Manifest, ParamMeta, build_plan, decode_manifest
from rdt_transport.consumer import Consumer
from rdt_transport.events import HostEvents
from rdt_transport.producer import Producer
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import JobSettings, RendezvousAddress, RendezvousClient, host_local
from rdt_transport.wire.nixl import NixlWire

HIDDEN, NUM_LAYERS, SEEDS = 64, 3, (1, 2)
TIMEOUT_SECONDS = 60.0  # of each wait


# ---- 1. the engine's model: nothing in it knows of any of this -----------------------------------
class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.empty(3 * HIDDEN, HIDDEN, dtype=torch.bfloat16))
        self.decay = nn.Parameter(torch.empty(HIDDEN))
        self.norm = nn.Parameter(torch.empty(HIDDEN))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            path, _, kind = name.rpartition(".")
            layer: Any = self.get_submodule(path)
            if kind == "q":
                weight = weight * HIDDEN**-0.5  # in float32, and rounded once, below
            if kind in ("q", "k", "v"):
                layer.qkv.data.chunk(3)["qkv".index(kind)].copy_(weight)
            elif kind == "log_decay":
                layer.decay.data.copy_(-torch.exp(weight))
            else:
                layer.norm.data.copy_(weight).add_(1.0)


def weights_of(seed: int) -> dict[str, Tensor]:
    """What the trainer holds after some step, in float32, under the names of its checkpoints."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {kind: (HIDDEN, HIDDEN) for kind in "qkv"}
    shapes |= {"log_decay": (HIDDEN,), "norm": (HIDDEN,)}
    return {
        f"layers.{layer}.{kind}": torch.randn(shape, generator=draw)
        for layer in range(NUM_LAYERS)
        for kind, shape in shapes.items()
    }


# ---- 2. the engine: record, plan, attach; then follow each sync ----------------------------------
class Engine:
    """One worker. The progress thread queues what has landed; the caller's thread installs it."""

    def __init__(self, model: Model, address: RendezvousAddress, undo: ExitStack) -> None:
        client = RendezvousClient(address, on_event=lambda event: self.consumer.on_event(event))
        undo.callback(client.close)
        job = client.job(TIMEOUT_SECONDS)
        manifest = decode_manifest(job.manifest)
        recording = record(model, model.load, manifest.params)  # once, without a weight
        recording.require_coverage()
        plan = build_plan(
            manifest,
            recording.writes,
            ConsumerId(replica=0, worker=0),
            num_workers=1,
            num_slots=job.num_slots,
            max_chunk_bytes=job.max_chunk_bytes,
            programs=recording.programs,
        )
        print(plan.explain(), flush=True)
        self.replay = PlanReplay(plan, lambda module, name: find_tensor(model, module, name))
        self.landed: queue.SimpleQueue[tuple[Chunk, Tensor]] = queue.SimpleQueue()
        progress = undo.enter_context(progress_thread("engine"))
        self.client, self.consumer = (
            client,
            Consumer(
                progress,
                client,
                plan=plan,
                num_workers=1,
                on_chunk=lambda chunk, packed: self.landed.put((chunk, packed)),
            ),
        )
        undo.callback(self.consumer.close)
        self.consumer.attach(TIMEOUT_SECONDS)

    def sync(self, epoch: int) -> None:
        """Every chunk, in the plan's order, then the commit: now it is one whole model again."""
        events = HostEvents()
        self.consumer.start(self.client.epoch_record(TIMEOUT_SECONDS, epoch))
        for _ in self.consumer.plan.chunks:
            chunk, packed = self.landed.get(timeout=TIMEOUT_SECONDS)
            self.replay.install(chunk, packed)
            self.consumer.scattered(chunk.index, events.record())
        self.replay.finish()
        self.consumer.wait(TIMEOUT_SECONDS)
        self.consumer.commit(TIMEOUT_SECONDS)


def serve(init_info: dict[str, Any], flip: bool) -> None:
    """The engine's process: attach, then sync and compare, twice."""
    with ExitStack() as undo, torch.no_grad():
        model = Model()
        engine = Engine(model, RendezvousAddress.from_init_info(init_info), undo)
        for epoch, seed in enumerate(SEEDS, start=1):
            engine.sync(epoch)
            if flip and seed == SEEDS[-1]:
                model.get_parameter("layers.1.decay").view(torch.uint8)[5] ^= 1
            expected = Model()
            expected.load(weights_of(seed).items())
            for (name, found), wanted in zip(
                model.named_parameters(), expected.parameters(), strict=True
            ):
                if not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
                    sys.exit(f"sync {epoch}: NOT exact: {name} is not what the loader makes it")
            print(f"sync {epoch}: exact", flush=True)
        engine.client.leave()


# ---- 3. the trainer: what ``rdt_trainer`` does for one rank, in short ----------------------------
def train(flip: bool) -> int:
    """Sync an engine of its own with new weights, twice; returns the engine's exit status."""
    manifest = Manifest.build(
        ParamMeta(name, "float32", tuple(tensor.shape)) for name, tensor in weights_of(0).items()
    )
    settings = JobSettings(num_producers=1, max_chunk_bytes=16 << 10)
    with ExitStack() as undo:
        host = host_local("plain-engine", secrets.token_hex(16), settings)
        undo.callback(host.close)
        client = RendezvousClient(host.address, on_event=lambda event: producer.on_event(event))
        undo.callback(client.close)
        progress = undo.enter_context(progress_thread("trainer"))
        producer = Producer(progress, client, rank=0, manifest=manifest, settings=settings)
        undo.callback(producer.close)
        producer.open(TIMEOUT_SECONDS)
        spawn = multiprocessing.get_context("spawn")  # a fresh process: NIXL does not survive forks
        engine = spawn.Process(target=serve, args=(host.address.init_info(), flip), daemon=True)
        engine.start()
        for epoch, seed in enumerate(SEEDS, start=1):
            weights = weights_of(seed)  # an optimizer step
            producer.begin(client.begin(0, epoch, TIMEOUT_SECONDS))
            for group in producer.groups:
                names = manifest.groups[group].names
                producer.publish(group, {name: weights[name] for name in names}, TIMEOUT_SECONDS)
            producer.finish(TIMEOUT_SECONDS)
            client.await_close(0, epoch, TIMEOUT_SECONDS)
        engine.join(TIMEOUT_SECONDS)
        return 1 if engine.exitcode is None else engine.exitcode


@contextmanager
def progress_thread(role: str) -> Generator[ProgressThread]:
    progress = ProgressThread(lambda: NixlWire(role), name=role)
    try:
        yield progress
    finally:
        progress.close()


if __name__ == "__main__":
    os.environ.setdefault("UCX_NET_DEVICES", "lo")  # both processes are on this host
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--flip", action="store_true", help="change one byte: the proof fails")
    sys.exit(train(parser.parse_args().flip))
