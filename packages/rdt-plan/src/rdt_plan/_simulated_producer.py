"""A simulated producer: its source, its driver, and its serve slots."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from rdt_plan._simulated_party import SimulatedParty
from rdt_plan._simulated_rendezvous import SimulatedRendezvous
from rdt_plan._simulated_rings import Ring, SimulatedRings
from rdt_plan._simulated_world import SESSION, Identity, Live, Slot, Step, World
from rdt_plan.doorbell import Doorbell, Kind
from rdt_plan.epoch import EpochState
from rdt_plan.identity import ConsumerId
from rdt_plan.mailbox import Mailbox, Verdict
from rdt_plan.producer_epoch import Pack, ProducerAction, ProducerEpoch, Ready, Release
from rdt_plan.table import ChunkTable

__all__ = ["SimulatedProducer"]

_OVER = (EpochState.FINISHED, EpochState.QUIESCED)


class SimulatedProducer(SimulatedParty):
    """Performs the actions of one `ProducerEpoch` after another, each some time later.

    Gathering a group is collective: it ends when every rank that takes part has come to it, in the
    same epoch. A rank comes to its next group when it has the credit; after an abort it goes on
    without publishing, and only then begins the next epoch. Consumers are admitted, and dismissed,
    while no epoch is open. A serve slot is None from the decision to pack until the pack has run.
    The tensors of a group may be read directly from the end of the first direct chunk's pack, which
    stands for the publisher's event, until the group is released; in an epoch that is given up,
    until the rendezvous has said so: before that, who reads them may still commit.

    Standing groups that leave every replica incomplete may be published before `confirm` has
    looked at them: whoever reads one that is not what it was must not commit.
    """

    def __init__(
        self,
        world: World,
        rendezvous: SimulatedRendezvous,
        rank: int,
        groups: Sequence[int],
        lookahead: int,
        *,
        num_epochs: int,
        num_slots: int,
        standing: Collection[int],
    ) -> None:
        super().__init__(world, rendezvous, f"producer {rank}")
        self.rank = rank
        self.groups = tuple(groups)
        self.epoch = ProducerEpoch({}, (), lookahead)  # before the first: one that is over
        self.max_resident = 0
        self.num_packs = 0
        self.num_pack_failures = self.num_replacements = 0  # to come
        self.num_reached = 0  # groups of this epoch that this rank has come to
        self._num_gathered = len(self.groups)
        self._lookahead = lookahead
        self._standing = frozenset(standing)
        self._is_confirmed = self._is_replaced = False  # of this epoch's standing groups
        self._num_epochs = num_epochs
        self._rings = SimulatedRings()
        self._newcomers: deque[tuple[ConsumerId, str, ChunkTable]] = deque()
        self._gone: deque[str] = deque()
        self._dropped: set[str] = set()
        self._failed: set[int] = set()
        self._mailbox = Mailbox(num_slots)
        self._asked = 0  # the last epoch that was asked for
        self._live: Live = {}
        self._open_rings: dict[str, Ring] = {}
        self._resident: set[int] = set()
        self._to_enqueue: deque[Pack] = deque()
        self._stream: deque[Pack] = deque()
        self._ran: list[Pack] = []
        world.receivers[self.name] = self

    @property
    def is_over(self) -> bool:
        """Whether nothing of an epoch is left to do."""
        return self.epoch.state in _OVER and self._num_gathered == len(self.groups)

    @property
    def is_running(self) -> bool:
        return self.epoch.state is EpochState.RUNNING

    @property
    def waits_to_begin(self) -> bool:
        return self._asked > self.number

    def waiting_for(self) -> str:
        if self.waits_to_begin:
            return f"epoch {self._asked} to open"
        return self.epoch.waiting_for()

    def steps(
        self, ranks_of: Mapping[int, Sequence["SimulatedProducer"]], *, may_ask: bool
    ) -> list[Step]:
        """Everything that could happen here next; ``ranks_of`` says who gathers a group."""
        steps: list[Step] = []
        if self.epoch.state in _OVER:
            if self._newcomers:
                steps.append(self._admit)
            if self._gone:
                steps.append(self._dismiss)
        if may_ask and self.is_over and not self.waits_to_begin and self.number < self._num_epochs:
            steps.append(self._ask)
        if self.num_reached > self._num_gathered:
            group = self.groups[self._num_gathered]
            if all(each.has_reached(group, self.number) for each in ranks_of[group]):
                steps.append(self._publish)
        elif self._num_gathered < len(self.groups) and (not self.is_running or self._may_reach()):
            steps.append(self._reach)
        if self.is_running and not self._is_confirmed:
            steps.append(self.confirm)
        if self._to_enqueue:
            steps.append(self._enqueue)
            if not self.is_running or not self._readers(self._to_enqueue[0]):
                steps.append(partial(self._end_pack, "given back"))
            if self.num_pack_failures:
                steps.append(self._fail_pack)
        if self._stream:
            steps.append(self._run)
        steps += [partial(self._observe, pack) for pack in self._ran]
        return steps

    def has_reached(self, group: int, epoch: int) -> bool:
        """Whether this rank has come to a gather that it and others make in ``epoch``."""
        if self.number != epoch:
            return self.number > epoch
        return group in self.groups[: self.num_reached]

    # ---- what it hears -------------------------------------------------------------------------

    def subscribed(self, who: ConsumerId, incarnation: str, table: ChunkTable) -> None:
        self._newcomers.append((who, incarnation, table))

    def dropped(self, who: ConsumerId, incarnation: str) -> None:
        self._dropped.add(incarnation)
        self._gone.append(incarnation)
        if self._live.get(who) == incarnation:
            self._perform(self.epoch.drop(who, "dropped"))

    def failed(self, epoch: int) -> None:
        self._failed.add(epoch)
        if epoch == self.number:
            self._perform(self.epoch.abort("told"))
            if self._may_change():
                self._change_sources()

    def begin(self, epoch: int, live: Live) -> None:
        self._change_sources()
        self.number = epoch
        self.num_reached = self._num_gathered = 0
        self._is_confirmed, self._is_replaced = False, self.num_replacements > 0
        self.num_replacements -= self._is_replaced
        self._live = {who: name for who, name in live.items() if self._rings.serves(name)}
        self._open_rings = dict(self._rings.rings)
        tables = {who: self._rings.table(name) for who, name in self._live.items()}
        self.epoch = ProducerEpoch(tables, self.groups, self._lookahead, self._standing)
        for doorbell in self._mailbox.open(SESSION, epoch):
            self._done(doorbell)
        for who, name in self._live.items():
            if name in self._dropped:
                self._perform(self.epoch.drop(who, "dropped"))
        if epoch in self._failed:
            self._perform(self.epoch.abort("told"))

    def deliver(self, sender: str, doorbell: Doorbell) -> None:
        if self._rings.serves(sender) and self._mailbox.accept(doorbell) is Verdict.DELIVER:
            self._done(doorbell)

    def _done(self, doorbell: Doorbell) -> None:
        for who, name in self._live.items():
            if self.world.address(name) == doorbell.sender:
                self._perform(self.epoch.done(who, doorbell.seq))

    # ---- what it does --------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Its source, or whatever else, went wrong."""
        if self.is_running:
            self._perform(self.epoch.abort(reason))
            self._tell_failure(reason)

    def _admit(self) -> None:
        who, incarnation, table = self._newcomers.popleft()
        if incarnation not in self._dropped:
            arena = self._rings.admit(who, incarnation, table).arena
            self._tell(lambda: self._rendezvous.offer(who, incarnation, self.rank, arena))

    def _dismiss(self) -> None:
        self._rings.dismiss(self._gone.popleft())

    def _ask(self) -> None:
        self._asked = self.number + 1
        self._tell(partial(self._rendezvous.begin, self.rank, self._asked))

    def _may_reach(self) -> bool:
        early = self.groups[: self.num_reached + 1]
        is_early = len(early) <= self.epoch.num_incomplete and self._standing.issuperset(early)
        return self.epoch.may_publish() and (self._is_confirmed or is_early)

    def confirm(self) -> None:
        self._is_confirmed = True
        if self._is_replaced:
            self.abort("a standing tensor was replaced")

    def _reach(self) -> None:
        self.num_reached += 1

    def _publish(self) -> None:
        group = self.groups[self._num_gathered]
        self._num_gathered += 1
        if not self.is_running:
            return
        self._resident.add(group)
        gathered = self._resident - self._standing
        self.max_resident = max(self.max_resident, len(gathered))
        if len(gathered) > self._lookahead + 1:
            self._violate(f"groups {sorted(gathered)} are resident")
        self._perform(self.epoch.publish(group))

    def _perform(self, actions: Iterable[ProducerAction]) -> None:
        for action in actions:
            if isinstance(action, Pack):
                if not self._readers(action):
                    self._violate(f"{action} for nobody")
                self.num_packs += 1
                if (slot := self._slot(action)) is not None:
                    self.world.serve[slot] = None
                self._to_enqueue.append(action)
            elif isinstance(action, Ready):
                name = self._live[action.consumer]
                if name in self._dropped:
                    self._violate(f"{action} for a dropped consumer")
                self.world.ring(self.number, self.name, name, Kind.READY, action.seq)
            elif isinstance(action, Release):
                self._resident.remove(action.group)
                self.world.sources[self.rank, action.group] = None
            else:
                if self._to_enqueue or self._stream or self._ran:
                    self._violate(f"{action} with a pack in flight")
                if self.epoch.state is EpochState.FINISHED and self._resident:
                    self._violate(f"groups {sorted(self._resident)} were never released")
                if self._may_change():
                    self._change_sources()

    def _may_change(self) -> bool:
        """Whether nothing here reads an epoch that was given up, and nobody can commit it."""
        return self.epoch.state is EpochState.QUIESCED and self.number in self._failed

    def _change_sources(self) -> None:
        for group in self._resident:
            self.world.sources[self.rank, group] = None
        self._resident.clear()

    def _enqueue(self) -> None:
        pack = self._to_enqueue.popleft()
        self._stream.append(pack)
        self._perform(self.epoch.pack_enqueued(pack.ring, pack.seq))

    def _fail_pack(self) -> None:
        self.num_pack_failures -= 1
        fails = self.is_running and bool(self._readers(self._to_enqueue[0]))
        self._end_pack("injected")
        if fails:
            self._tell_failure("a pack failed")

    def _end_pack(self, reason: str) -> None:
        pack = self._to_enqueue.popleft()
        self._perform(self.epoch.pack_failed(pack.ring, pack.seq, reason))

    def _run(self) -> None:
        pack = self._stream.popleft()
        group = self._open_rings[pack.ring].table.chunks[pack.seq].group
        if group not in self._resident:
            self._violate(f"{pack} reads group {group}, which is not resident")
        if (slot := self._slot(pack)) is None:
            is_wrong = self._is_replaced and group in self._standing
            self.world.sources[self.rank, group] = None if is_wrong else self.number
        else:
            identity: Identity = (self.number, pack.ring, self.rank, pack.seq)
            self.world.serve[slot] = identity
        self._ran.append(pack)

    def _observe(self, pack: Pack) -> None:
        self._ran.remove(pack)
        self._perform(self.epoch.packed(pack.ring, pack.seq))

    def _readers(self, pack: Pack) -> list[str]:
        """Those of its ring that are in the epoch and, as far as it has heard, live."""
        readers = self._open_rings[pack.ring].readers
        names = [name for name in self._live.values() if name in readers]
        return [name for name in names if name not in self._dropped]

    def _slot(self, pack: Pack) -> Slot | None:
        ring = self._open_rings[pack.ring]
        slot = ring.table.chunks[pack.seq].serve_slot
        return None if slot is None else (self.rank, ring.arena, slot)
