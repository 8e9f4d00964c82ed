"""The plan of one consumer: every READ of a weight sync, built once and then only followed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from operator import itemgetter

from rdt_plan._plan_columns import plan_columns
from rdt_plan.chunks import Chunk, Draft, ServeChunk, drafts_of
from rdt_plan.collector import collector_paused
from rdt_plan.digest import digest_of
from rdt_plan.direct import DirectRule
from rdt_plan.dtypes import item_bytes
from rdt_plan.errors import PlanError
from rdt_plan.explanation import explain
from rdt_plan.groups import group_schedule
from rdt_plan.identity import ConsumerId
from rdt_plan.lanes import lanes_of, slots_of
from rdt_plan.manifest import Manifest
from rdt_plan.placement import Fill, Placement, Write
from rdt_plan.program import Program
from rdt_plan.slices import Slice
from rdt_plan.staging import check_programs, is_staging, staging_bytes, stagings
from rdt_plan.streams import streams_of
from rdt_plan.table import ChunkTable, slot_bytes

__all__ = ["ChunkTable", "ConsumerId", "SyncPlan", "build_plan"]

_MODULE = itemgetter(Placement._fields.index("module"))


@dataclass(frozen=True)
class SyncPlan:
    """What one consumer reads from whom, into which slot, and where the bytes then go.

    Attributes:
        consumer: whose plan it is.
        manifest_digest: digest of the manifest it was built from.
        schedule: the group schedule, a permutation of all gather groups.
        num_slots: slots of the receive ring, and of every serve ring.
        max_chunk_bytes: cap on a chunk that takes a slot; only a piece that cannot be cut exceeds
            it.
        chunks: in plan order: schedule position of the group, owner, seq. Of each group and owner,
            direct ones come first.
        fills: constants, written when their module is materialised, before its placements.
        modules_without_chunks: modules to materialise and complete although no byte is read for
            them: they have only fills, only tensors without elements, or a program without inputs.
        programs: at most one a module, run when its last chunk has been placed. Their inputs arrive
            by placements into tensors that `rdt_plan.staging` names.
    """

    consumer: ConsumerId
    manifest_digest: str
    schedule: tuple[int, ...]
    num_slots: int
    max_chunk_bytes: int
    chunks: tuple[Chunk, ...]
    fills: tuple[Fill, ...]
    modules_without_chunks: tuple[str, ...] = ()
    programs: tuple[Program, ...] = ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything but ``consumer``: equal workers of two replicas agree."""
        with collector_paused():
            return digest_of("plan", plan_columns(self))

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that serve at least one chunk, ascending."""
        return tuple(sorted(self._tables))

    def table(self, owner: int) -> ChunkTable:
        """The chunks that ``owner`` serves; raises `PlanError` when it serves none."""
        try:
            return self._tables[owner]
        except KeyError:
            raise PlanError(
                f"the plan of {self.consumer} reads nothing from rank {owner}: "
                f"expected one of its owners {self.owners}"
            ) from None

    @cached_property
    def lanes(self) -> Mapping[int, int]:
        """The lane of each owner that serves chunks through slots (`rdt_plan.lanes`)."""
        slotted = [chunk for chunk in self.chunks if not chunk.is_direct]
        return lanes_of(
            (chunk.owner, (chunk.receive_slot, *(copy.module for copy in chunk.placements)))
            for chunk in slotted
        )

    @property
    def receive_slot_bytes(self) -> int:
        """Bytes of one receive slot, a multiple of 16; 0 when no chunk takes one."""
        return slot_bytes(chunk.serve for chunk in self.chunks)

    @property
    def max_unread(self) -> int:
        """How many chunks a producer can have announced that this consumer has not read."""
        return self.num_slots + sum(chunk.is_direct for chunk in self.chunks)

    @property
    def bytes_pulled(self) -> int:
        """Bytes that cross the wire, the padding between slices included."""
        return self.direct_bytes + self.staged_bytes

    @property
    def direct_bytes(self) -> int:
        """Bytes that are read from the producers' own tensors into the model's."""
        return sum(chunk.serve.num_bytes for chunk in self.chunks if chunk.is_direct)

    @property
    def staged_bytes(self) -> int:
        """Bytes that pass through slots, the padding between slices included."""
        return sum(chunk.serve.num_bytes for chunk in self.chunks if not chunk.is_direct)

    @property
    def slice_bytes(self) -> int:
        """Bytes that cross the wire, without padding."""
        return sum(s.num_bytes for chunk in self.chunks for s in chunk.serve.slices)

    @property
    def bytes_landed(self) -> int:
        """Bytes that placements write into tensors of the model.

        Neither fills are counted, nor what programs write or compute from.
        """
        return sum(
            prod(placement.shape) * item_bytes(placement.dtype)
            for chunk in self.chunks
            for placement in chunk.placements
            if not is_staging(placement.param)
        )

    @property
    def staging_bytes(self) -> Mapping[str, int]:
        """By module with a program, the bytes of all its inputs, held until its last chunk."""
        return staging_bytes(self.programs)

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module it writes, by first chunk; those without chunks come last."""
        started = (module for chunk in self.chunks for module in chunk.materialize)
        return (*started, *self.modules_without_chunks)

    def explain(self) -> str:
        """The plan as text: a header, one line a chunk, totals."""
        return explain(self)

    @cached_property
    def _tables(self) -> dict[int, ChunkTable]:
        rows: dict[int, list[ServeChunk]] = {}
        for chunk in self.chunks:
            rows.setdefault(chunk.owner, []).append(chunk.serve)
        return {
            owner: ChunkTable(
                consumer=self.consumer,
                owner=owner,
                plan_digest=self.digest,
                num_slots=self.num_slots,
                slot_bytes=slot_bytes(chunks),
                chunks=tuple(chunks),
            )
            for owner, chunks in rows.items()
        }


@collector_paused()
def build_plan(
    manifest: Manifest,
    writes: Sequence[Write],
    consumer: ConsumerId,
    *,
    num_workers: int,
    num_slots: int = 2,
    max_chunk_bytes: int = 64 << 20,
    programs: Sequence[Program] = (),
    direct: DirectRule | None = None,
    max_direct_bytes: int = 1 << 30,
) -> SyncPlan:
    """Plan the sync of one consumer.

    Args:
        manifest: what the trainer holds.
        writes: what the consumer's loaders do with it, in their order. Placements may run in any
            order; those that write the same element twice are not ours to find.
        consumer: whose plan it is.
        num_workers: workers of its replica.
        num_slots: slots of each ring.
        max_chunk_bytes: cap on a chunk that takes a slot, in bytes.
        programs: what the loaders compute; at most one a module, and no tensor is both written
            here and touched by one.
        direct: what may be read from the trainer's memory into the model's; None: nothing. A
            module with a fill or a program has no part in it.
        max_direct_bytes: cap on a direct chunk, in bytes.

    Raises:
        PlanError: a name that is not in the manifest, or a write or program that contradicts
            itself or another.
        SliceError: a slice that leaves its tensor.
        OwnershipError, RoutingError: nobody can serve a slice.
    """
    if num_slots < 1 or max_chunk_bytes < 1 or max_direct_bytes < 1:
        raise PlanError(
            f"expected at least 1 slot and 1 byte, found {num_slots=}, {max_chunk_bytes=} and "
            f"{max_direct_bytes=}"
        )
    check_programs(programs, writes)
    writes = [*writes, *chain.from_iterable(map(stagings, programs))]
    schedule = group_schedule(manifest)
    fills = tuple(write for write in writes if isinstance(write, Fill))
    rule = direct or DirectRule({}, frozenset())
    rule = rule.without({each.module for each in (*fills, *programs)})
    streams = streams_of(manifest, writes, consumer.worker, num_workers, rule)
    drafts = [
        (owner, group, draft)
        for group in schedule
        for owner, stream in sorted(streams.get(group, {}).items())
        for draft in drafts_of(stream, max_chunk_bytes, max_direct_bytes)
    ]
    chunks = _chunks(drafts, num_slots, manifest.ownership.set_by_name)
    started = {module for chunk in chunks for module in chunk.materialize}
    modules = dict.fromkeys([each.module for each in (*writes, *programs)])
    return SyncPlan(
        consumer=consumer,
        manifest_digest=manifest.digest,
        schedule=schedule,
        num_slots=num_slots,
        max_chunk_bytes=max_chunk_bytes,
        chunks=chunks,
        fills=fills,
        modules_without_chunks=tuple(module for module in modules if module not in started),
        programs=tuple(programs),
    )


def _chunks(
    drafts: Sequence[tuple[int, int, Draft]], num_slots: int, sets: Mapping[str, int]
) -> tuple[Chunk, ...]:
    """Number the drafts, which are in plan order, and find each module's first and last one.

    ``sets`` are the owner sets of names that are held whole.
    """
    modules = [dict.fromkeys(map(_MODULE, draft.placements)) for _, _, draft in drafts]
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, touched in enumerate(modules):
        for module in touched:
            first.setdefault(module, index)
            last[module] = index
    tied = lanes_of(
        (owner, (*touched, *(_sets_of(draft.slices, sets) if sets else ())))
        for (owner, _, draft), touched in zip(drafts, modules, strict=True)
        if not draft.is_direct
    )
    lanes = {owner: lane % num_slots for owner, lane in tied.items()}
    num_lanes = len(set(lanes.values()))
    next_seq: Counter[int] = Counter()
    slotted: Counter[int] = Counter()  # chunks that take a slot, by owner
    received: Counter[int] = Counter()  # and by lane
    chunks = []
    for index, (owner, group, draft) in enumerate(drafts):
        seq = next_seq[owner]
        next_seq[owner] += 1
        serve_slot = receive_slot = None
        if not draft.is_direct:
            lane = lanes[owner]
            slots = slots_of(lane, num_lanes, num_slots)
            serve_slot = slotted[owner] % num_slots
            receive_slot = slots[received[lane] % len(slots)]
            slotted[owner] += 1
            received[lane] += 1
        chunks.append(
            Chunk(
                index=index,
                owner=owner,
                serve=ServeChunk(
                    seq=seq,
                    group=group,
                    serve_slot=serve_slot,
                    num_bytes=draft.layout.num_bytes,
                    slices=draft.slices,
                    offsets=draft.layout.offsets,
                ),
                receive_slot=receive_slot,
                placements=draft.placements,
                materialize=tuple(m for m in modules[index] if first[m] == index),
                complete=tuple(m for m in modules[index] if last[m] == index),
            )
        )
    return tuple(chunks)


def _sets_of(slices: Sequence[Slice], sets: Mapping[str, int]) -> set[int]:
    return {sets[slice_.name] for slice_ in slices if slice_.name in sets}
