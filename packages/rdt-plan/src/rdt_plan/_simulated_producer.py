"""A simulated producer: its source, its driver, and its serve slots."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from rdt_plan._simulated_world import Step, World, address_of
from rdt_plan.doorbell import Doorbell, Kind
from rdt_plan.epoch import EpochState
from rdt_plan.identity import ConsumerId
from rdt_plan.producer_epoch import Pack, ProducerAction, ProducerEpoch, Ready, Release
from rdt_plan.table import ChunkTable

__all__ = ["SimulatedProducer"]


class SimulatedProducer:
    """Performs the actions of one `ProducerEpoch`, each some time later.

    Gathering a group is collective: it ends when every rank that takes part has come to it. A rank
    comes to its next group when it has the credit; after an abort it goes on without publishing.
    A serve slot is None from the decision to pack until the pack has run.
    """

    def __init__(
        self,
        world: World,
        rank: int,
        tables: Mapping[ConsumerId, ChunkTable],
        addresses: Mapping[ConsumerId, bytes],
        groups: Sequence[int],
        lookahead: int,
    ) -> None:
        self.world = world
        self.rank = rank
        self.groups = tuple(groups)
        self.address = address_of(self.name)
        self.epoch = ProducerEpoch(tables, groups, lookahead)
        self.max_resident = 0
        self.num_reached = 0  # groups this rank has come to
        self._num_gathered = 0
        self._tables = tables
        self._addresses = addresses
        self._consumer_of = {address: consumer for consumer, address in addresses.items()}
        self._lookahead = lookahead
        self._resident: set[int] = set()
        self._to_enqueue: deque[Pack] = deque()
        self._stream: deque[Pack] = deque()
        self._ran: list[Pack] = []
        self._dropped: set[ConsumerId] = set()

    @property
    def name(self) -> str:
        return f"producer {self.rank}"

    @property
    def is_over(self) -> bool:
        over = self.epoch.state in (EpochState.FINISHED, EpochState.QUIESCED)
        return over and self._num_gathered == len(self.groups)

    @property
    def in_flight(self) -> bool:
        return bool(self._to_enqueue or self._stream or self._ran)

    def steps(self, ranks_of: Mapping[int, Sequence["SimulatedProducer"]]) -> list[Step]:
        """Everything that could happen here next; ``ranks_of`` says who gathers a group."""
        steps: list[Step] = []
        if self.num_reached > self._num_gathered:
            group = self.groups[self._num_gathered]
            if all(other.has_reached(group) for other in ranks_of[group]):
                steps.append(self._publish)
        elif self._num_gathered < len(self.groups):
            if self.epoch.may_publish() or self.epoch.state is not EpochState.RUNNING:
                steps.append(self._reach)
        if self._to_enqueue:
            steps.append(self._enqueue)
            aborting = self.epoch.state is EpochState.ABORTING
            if aborting or self._to_enqueue[0].consumer in self._dropped:
                steps.append(self._give_back)
        if self._stream:
            steps.append(self._run)
        for pack in self._ran:
            steps.append(lambda pack=pack: self._observe(pack))
        return steps

    def has_reached(self, group: int) -> bool:
        return group in self.groups[: self.num_reached]

    def deliver(self, doorbell: Doorbell) -> None:
        self._perform(self.epoch.done(self._consumer_of[doorbell.sender], doorbell.seq))

    def drop(self, consumer: ConsumerId) -> None:
        self._dropped.add(consumer)
        self._perform(self.epoch.drop(consumer, "injected"))

    def abort(self, reason: str) -> None:
        self._perform(self.epoch.abort(reason))

    def _reach(self) -> None:
        self.num_reached += 1

    def _publish(self) -> None:
        group = self.groups[self._num_gathered]
        self._num_gathered += 1
        if self.epoch.state is not EpochState.RUNNING:
            return
        self._resident.add(group)
        self.max_resident = max(self.max_resident, len(self._resident))
        if len(self._resident) > self._lookahead + 1:
            self._violate(f"groups {sorted(self._resident)} are resident")
        self._perform(self.epoch.publish(group))

    def _perform(self, actions: Iterable[ProducerAction]) -> None:
        for action in actions:
            if isinstance(action, Pack):
                if action.consumer in self._dropped:
                    self._violate(f"{action} for a dropped consumer")
                self.world.serve[self._slot(action)] = None
                self._to_enqueue.append(action)
            elif isinstance(action, Ready):
                if action.consumer in self._dropped:
                    self._violate(f"{action} for a dropped consumer")
                receiver = self._addresses[action.consumer]
                self.world.send(self.address, receiver, Kind.READY, action.seq)
            elif isinstance(action, Release):
                self._resident.remove(action.group)
            else:
                if self.in_flight:
                    self._violate(f"{action} with a pack in flight")
                if self.epoch.state is EpochState.FINISHED and self._resident:
                    self._violate(f"groups {sorted(self._resident)} were never released")
                self._resident.clear()

    def _enqueue(self) -> None:
        pack = self._to_enqueue.popleft()
        self._stream.append(pack)
        self._perform(self.epoch.pack_enqueued(pack.consumer, pack.seq))

    def _give_back(self) -> None:
        pack = self._to_enqueue.popleft()
        self._perform(self.epoch.pack_failed(pack.consumer, pack.seq, "aborted"))

    def _run(self) -> None:
        pack = self._stream.popleft()
        group = self._tables[pack.consumer].chunks[pack.seq].group
        if group not in self._resident:
            self._violate(f"{pack} reads group {group}, which is not resident")
        self.world.serve[self._slot(pack)] = (pack.consumer, self.rank, pack.seq)
        self._ran.append(pack)

    def _observe(self, pack: Pack) -> None:
        self._ran.remove(pack)
        self._perform(self.epoch.packed(pack.consumer, pack.seq))

    def _slot(self, pack: Pack) -> tuple[int, ConsumerId, int]:
        chunk = self._tables[pack.consumer].chunks[pack.seq]
        return (self.rank, pack.consumer, chunk.serve_slot)

    def _violate(self, what: str) -> None:
        self.world.violations.append(f"{self.name}: {what}")
