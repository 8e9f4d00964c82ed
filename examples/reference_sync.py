"""A whole weight sync in one process, on the CPU: no network, no Ray, no vLLM, nothing hidden.

Two trainer ranks hold a model, a pipeline stage each. Two inference workers hold it as well, but
cut for tensor parallelism: each needs its half of every projection, from whichever rank holds it:

1. the inference model, with the kind of loader that inference engines have;
2. what the trainer holds: the manifest;
3. once: record the loader, and plan;
4. every sync: the two state machines, driven by hand over rings of plain memory;
5. the proof: every byte equals that of a model which loaded the same weights itself.

The product reads across machines, and decides by the very same code.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from rdt_bake import apply_placement, find_tensor, read_slice, record
from rdt_plan import (
    ConsumerAction,
    ConsumerEpoch,
    ConsumerId,
    Doorbell,
    EpochState,
    Kind,
    Manifest,
    Pack,
    ParamMeta,
    PostRead,
    ProducerAction,
    ProducerEpoch,
    Ready,
    Release,
    Scatter,
    SyncPlan,
    build_plan,
    check_table,
    decode_table,
    encode_table,
    rank_schedule,
)

HIDDEN, HEADS, NUM_LAYERS, NUM_RANKS, NUM_WORKERS = 16, 24, 2, 2, 2
CHUNK_BYTES = 1024  # small, so that every ring's two slots are used again and again


# ---- 1. the inference model ----------------------------------------------------------------------
class Layer(nn.Module):
    """One worker's half. It fuses what a checkpoint keeps apart: q, k and v are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        rows = HEADS // NUM_WORKERS
        self.qkv = nn.Parameter(torch.empty(3 * rows, HIDDEN), requires_grad=False)
        self.out = nn.Parameter(torch.empty(HIDDEN, rows), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(HIDDEN, dtype=torch.bfloat16), requires_grad=False)


class Model(nn.Module):
    """Loads by itself, in plain torch. Nothing in it knows that it will be recorded."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self.worker = worker
        self.embed = nn.Parameter(torch.empty(8, HIDDEN), requires_grad=False)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            path, _, kind = name.rpartition(".")
            if kind in ("q", "k", "v"):
                half = weight.chunk(NUM_WORKERS)[self.worker]
                self.get_parameter(f"{path}.qkv").data.chunk(3)["qkv".index(kind)].copy_(half)
            elif kind == "out":  # half of the columns: a strided region, no range of bytes
                self.get_parameter(name).data.copy_(weight.chunk(NUM_WORKERS, 1)[self.worker])
            else:
                self.get_parameter(name).data.copy_(weight)


# ---- 2. what the trainer holds -------------------------------------------------------------------
def checkpoint(seed: int) -> dict[str, Tensor]:
    """The weights after some optimizer step: whole, under checkpoint names."""
    generator = torch.Generator().manual_seed(seed)
    weights = {"embed": torch.randn(8, HIDDEN, generator=generator)}
    for layer in range(NUM_LAYERS):
        for kind in ("q", "k", "v"):
            weights[f"layers.{layer}.{kind}"] = torch.randn(HEADS, HIDDEN, generator=generator)
        weights[f"layers.{layer}.out"] = torch.randn(HIDDEN, HEADS, generator=generator)
        weights[f"layers.{layer}.norm"] = torch.randn(HIDDEN, generator=generator).bfloat16()
    return weights


def describe(weights: Mapping[str, Tensor]) -> Manifest:
    """Names, dtypes, shapes, and who holds what: rank 0 the first stage, rank 1 the second."""
    owners = {name: (1,) if name.startswith("layers.1.") else (0,) for name in weights}
    return Manifest.build(
        ParamMeta(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), owners[name])
        for name, t in weights.items()
    )


# ---- 3. once: record and plan --------------------------------------------------------------------
def plan_for(worker: int, manifest: Manifest) -> SyncPlan:
    """Where the loader puts every slice, read off one run of it over tensors without memory."""
    with torch.device("meta"):
        model = Model(worker)
    recording = record(model, model.load_weights, manifest.params)
    recording.require_coverage()  # a parameter that nothing writes is an error now, not later
    who, writes = ConsumerId(replica=0, worker=worker), recording.writes
    return build_plan(
        manifest, writes, who, num_workers=NUM_WORKERS, num_slots=2, max_chunk_bytes=CHUNK_BYTES
    )


# ---- 4. every sync: both machines, driven by hand ------------------------------------------------
#
# A machine takes an event (a method call) and answers with actions, in the order to perform them.
# Here all is done at once; in the product a copy's event comes when its stream says it is complete.
def ring(num_slots: int, slot_bytes: int) -> dict[int | None, Tensor]:
    """Allocated, and registered with the network, once. Direct chunks, not used here, need none."""
    return {slot: torch.zeros(slot_bytes, dtype=torch.uint8) for slot in range(num_slots)}


class Producer:
    """One trainer rank: packs slices of its tensors into serve slots, group after group."""

    def __init__(self, rank: int, held: Manifest, got: dict[ConsumerId, bytes], job: "Job") -> None:
        self.rank, self.job = rank, job
        self.groups = rank_schedule(held, rank)
        self.names = [param.name for param in held.params if rank in param.owners]
        self.tables = {who: decode_table(table, who) for who, table in got.items()}
        for table in self.tables.values():
            check_table(table, held, rank)  # a stranger's word: bounds, owners, sizes
        self.by_digest = {table.plan_digest: table for table in self.tables.values()}
        # A ring for each plan, not for each consumer: replicas with equal plans read the same one.
        self.rings = {d: ring(t.num_slots, t.slot_bytes) for d, t in self.by_digest.items()}

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        self.weights, self.unpublished = weights, deque(self.groups)
        self.machine = ProducerEpoch(self.tables, self.groups, lookahead=0)
        self.publish()

    def publish(self) -> None:
        """Gather a group whenever the machine gives credit: ``lookahead + 1`` are resident."""
        while self.machine.may_publish():
            group = self.unpublished.popleft()
            self.job.say(f"producer {self.rank} publishes group {group}")
            self.perform(self.machine.publish(group))

    def done(self, worker: int, seq: int) -> None:
        """A slot was read: it may be packed again, and perhaps its group is needed no more."""
        self.perform(self.machine.done(ConsumerId(0, worker), seq))
        self.publish()

    def perform(self, actions: Iterable[ProducerAction]) -> None:
        queue = deque(actions)
        while queue:
            match queue.popleft():
                case Pack(digest, seq):
                    self.pack(digest, seq)
                    queue += self.machine.pack_enqueued(digest, seq)
                    queue += self.machine.packed(digest, seq)
                case Ready(consumer, seq):  # not before: now the slot is readable
                    self.job.send(Kind.READY, self.rank, consumer.worker, seq)
                case Release(group):  # its tensors may change, or go
                    self.job.say(f"producer {self.rank} releases group {group}")

    def pack(self, digest: str, seq: int) -> None:
        """The slices of one chunk, one after another, each at a multiple of 16."""
        chunk = self.by_digest[digest].chunks[seq]
        slot = self.rings[digest][chunk.serve_slot]
        for region, offset in zip(chunk.slices, chunk.offsets, strict=True):
            packed = read_slice(self.weights[region.name], region).contiguous().flatten()
            slot[offset : offset + region.num_bytes] = packed.view(torch.uint8)
        where = f"seq {seq} of plan {digest[:4]} into serve slot {chunk.serve_slot}"
        self.job.say(f"producer {self.rank} packs {where}: {chunk.tensors}")


class Consumer:
    """One inference worker: reads chunks in plan order, scatters them, completes modules."""

    def __init__(self, plan: SyncPlan, job: "Job") -> None:
        self.plan, self.worker, self.job = plan, plan.consumer.worker, job
        self.model = Model(self.worker)
        self.slots = ring(plan.num_slots, plan.receive_slot_bytes)

    def begin(self) -> None:
        self.machine = ConsumerEpoch(self.plan.chunks, self.plan.num_slots)  # for one epoch
        self.perform(self.machine.begin())

    def perform(self, actions: Iterable[ConsumerAction]) -> None:
        queue = deque(actions)
        while queue:
            match queue.popleft():
                case PostRead(index):
                    self.read(index)
                    queue += self.machine.read_done(index)
                case Scatter(index):
                    self.scatter(index)
                    # Both, in this order: only then may another READ overwrite the slot.
                    queue += self.machine.scatter_enqueued(index)
                    queue += self.machine.scatter_completed(index)

    def read(self, index: int) -> None:
        """The one-sided READ: out of the producer's memory, which is not asked for anything."""
        chunk = self.plan.chunks[index]
        source = self.job.producers[chunk.owner].rings[self.plan.digest][chunk.serve.serve_slot]
        self.slots[chunk.receive_slot][: chunk.serve.num_bytes] = source[: chunk.serve.num_bytes]
        self.job.say(f"  worker {self.worker} reads chunk {index} into slot {chunk.receive_slot}")
        self.job.send(Kind.DONE, self.worker, chunk.owner, chunk.serve.seq)

    def scatter(self, index: int) -> None:
        """From packed bytes to where the loader would have put them."""
        chunk = self.plan.chunks[index]
        start = dict(zip(chunk.serve.slices, chunk.serve.offsets, strict=True))
        for each in chunk.placements:
            offset, num_bytes = start[each.slice], each.slice.num_bytes
            packed = self.slots[chunk.receive_slot][offset : offset + num_bytes]
            apply_placement(each, packed, find_tensor(self.model, each.module, each.param))
        for module in chunk.complete:  # here an engine transposes it, say, for its kernels
            self.job.say(f"  worker {self.worker} has all of {module or 'the root module'}")


class Job:
    """Everybody, and the doorbells between them: 64 bytes each, and never a weight."""

    def __init__(self, manifest: Manifest, plans: list[SyncPlan]) -> None:
        self.consumers = [Consumer(plan, self) for plan in plans]
        self.producers = [
            Producer(rank, manifest, {p.consumer: encode_table(p.table(rank)) for p in plans}, self)
            for rank in range(NUM_RANKS)
        ]
        self.epoch = 0
        self.doorbells: deque[bytes] = deque()

    def send(self, kind: Kind, sender: int, receiver: int, seq: int) -> None:
        session, source, to = (i.to_bytes(16, "little") for i in (7, sender, receiver))
        self.doorbells.append(Doorbell(session, self.epoch, source, to, kind, seq).encode())

    def sync(self, weights: Mapping[str, Tensor]) -> None:
        self.epoch += 1
        for consumer in self.consumers:
            consumer.begin()
        for producer in self.producers:
            producer.begin({name: weights[name] for name in producer.names})
        while self.doorbells:  # until nobody has anything to say
            bell = Doorbell.decode(self.doorbells.popleft())
            sender, receiver = (int.from_bytes(i, "little") for i in (bell.sender, bell.receiver))
            if bell.kind is Kind.READY:
                consumer = self.consumers[receiver]
                consumer.perform(consumer.machine.ready(sender, bell.seq))
            else:
                self.producers[receiver].done(sender, bell.seq)
        for party in (*self.producers, *self.consumers):
            assert party.machine.state is EpochState.FINISHED, party.machine.waiting_for()

    def say(self, what: str) -> None:
        print(f"epoch {self.epoch}: {what}")


# ---- 5. the proof --------------------------------------------------------------------------------
def difference(model: Model, weights: Mapping[str, Tensor]) -> str | None:
    """The first byte that a fresh model's own load makes another; None when there is none."""
    fresh = Model(model.worker)
    fresh.load_weights(weights.items())
    for name, expected in fresh.named_parameters():
        found = model.get_parameter(name).flatten().view(torch.uint8)
        if len(wrong := (found != expected.flatten().view(torch.uint8)).nonzero()):
            return f"worker {model.worker}: byte {int(wrong[0])} of {name}"
    return None


def main(flip: bool) -> int:
    manifest = describe(checkpoint(seed=0))
    plans = [plan_for(worker, manifest) for worker in range(NUM_WORKERS)]
    print(plans[0].explain())
    job = Job(manifest, plans)
    for seed in (1, 2):  # the second sync follows the same plan: nothing is recorded again
        weights = checkpoint(seed)
        job.sync(weights)
        if flip:
            job.consumers[1].model.get_parameter("layers.1.qkv").view(torch.uint8)[3, 5] ^= 1
        for consumer in job.consumers:
            if found := difference(consumer.model, weights):
                print(f"NOT exact: {found} is not what the model's own load makes it")
                return 1
        total = sum(tensor.nbytes for tensor in weights.values())
        print(f"exact; each worker pulled {plans[0].slice_bytes:,} of {total:,} bytes\n")
    return 0


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--flip", action="store_true", help="change a byte, which is then named")
    raise SystemExit(main(parser.parse_args().flip))
