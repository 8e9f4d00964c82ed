"""A simulated consumer: its driver, its installer, and its receive slots."""

from collections import deque
from collections.abc import Iterable
from functools import partial

from rdt_plan._simulated_party import SimulatedParty
from rdt_plan._simulated_rendezvous import SimulatedRendezvous
from rdt_plan._simulated_world import SESSION, Identity, Live, Step, World
from rdt_plan.consumer_epoch import ConsumerAction, ConsumerEpoch, PostRead, Scatter
from rdt_plan.doorbell import Doorbell, Kind
from rdt_plan.epoch import EpochState, Finished
from rdt_plan.errors import ProtocolError
from rdt_plan.identity import ConsumerId
from rdt_plan.mailbox import Mailbox, Verdict
from rdt_plan.plan import SyncPlan

__all__ = ["SimulatedConsumer"]

_OVER = (EpochState.FINISHED, EpochState.QUIESCED)


class SimulatedConsumer(SimulatedParty):
    """One incarnation: performs the actions of one `ConsumerEpoch` after another, each later.

    A receive slot is None from the posting of a READ until it lands, and a READ lands only what
    its serve slot, or the producer's own memory, held all the while. A scatter must find its chunk
    when it is enqueued and still when it runs: whoever overwrites a slot early is seen there. One
    that is fenced, or whose epoch was given up, may find anything; but it must never commit that.
    """

    def __init__(
        self,
        world: World,
        rendezvous: SimulatedRendezvous,
        plan: SyncPlan,
        incarnation: int,
        num_workers: int,
        *,
        num_stale_events: int,
    ) -> None:
        super().__init__(world, rendezvous, f"consumer {plan.consumer}#{incarnation}")
        self.plan = plan
        self.epoch = ConsumerEpoch((), plan.num_slots)  # before the first: one that is over
        self.epoch.begin()
        self.is_ready = False
        self.num_read_failures = 0  # to come
        self._mailbox = Mailbox(plan.max_unread)
        self._arenas: dict[int, int] = {}
        self._told = False  # that it was dropped
        self._failed: set[int] = set()
        self._next: int | None = None  # an epoch to start when the last one is over
        self._owner_of = {world.address(f"producer {owner}"): owner for owner in plan.owners}
        self._slots: list[Identity | None] = [None] * plan.num_slots
        self._reading: dict[int, Identity | None] = {}  # and what the serve slot held when posted
        self._landed: list[int] = []
        self._to_enqueue: deque[int] = deque()
        self._stream: deque[tuple[int, bool]] = deque()  # and whether the slot was right so far
        self._ran: list[int] = []
        self._scattered: list[int] = []
        self._placed: dict[int, bool] = {}  # direct chunks, and whether their source stood still
        self._num_stale_events = num_stale_events
        world.receivers[self.name] = self
        tables = [plan.table(owner) for owner in plan.owners]
        self._tell(lambda: rendezvous.subscribe(plan.consumer, self, num_workers, tables))

    @property
    def is_over(self) -> bool:
        return self.epoch.state in _OVER and self._next is None

    @property
    def is_fenced(self) -> bool:
        return self.name in self.world.fenced

    @property
    def in_flight(self) -> bool:
        return bool(self._reading or self._landed or self._to_enqueue or self._stream or self._ran)

    def waiting_for(self) -> str:
        return self.epoch.waiting_for() if self.is_ready else "offers"

    def steps(self) -> list[Step]:
        """Everything that could happen here next."""
        steps: list[Step] = []
        if not self.is_ready and len(self._arenas) == len(self.plan.owners):
            steps.append(self._meet)
        if self._next is not None and self.epoch.state in _OVER:
            steps.append(self._start)
        if self.epoch.state is EpochState.RUNNING and (self._told or self.number in self._failed):
            steps.append(self._heed)
        for index in self._reading:
            steps.append(partial(self._land, index))
            if self.num_read_failures:
                steps.append(partial(self._fail_read, index))
        steps += [partial(self._observe_read, index) for index in self._landed]
        if self._to_enqueue:
            steps.append(self._enqueue)
            if self.epoch.state is EpochState.ABORTING:
                steps.append(self._give_back)
        if self._stream:
            steps.append(self._run)
        steps += [partial(self._observe_scatter, index) for index in self._ran]
        if self._num_stale_events and steps and self.epoch.state is EpochState.RUNNING:
            steps.append(self._complete_wrongly)
        return steps

    # ---- what it hears -------------------------------------------------------------------------

    def offered(self, rank: int, arena: int) -> None:
        self._arenas[rank] = arena

    def started(self, epoch: int, live: Live) -> None:
        self._next = epoch

    def granted(self, epoch: int) -> None:
        if torn := [index for index, is_right in self._placed.items() if not is_right]:
            self._violate(f"committed chunks {torn}, whose sources changed while they were read")

    def dropped(self, who: ConsumerId, incarnation: str) -> None:
        if incarnation == self.name:
            self._told = True
            self._next = None

    def failed(self, epoch: int) -> None:
        self._failed.add(epoch)

    def deliver(self, sender: str, doorbell: Doorbell) -> None:
        if self._mailbox.accept(doorbell) is Verdict.DELIVER:
            self._ready(doorbell)

    def _ready(self, doorbell: Doorbell) -> None:
        self._perform(self.epoch.ready(self._owner_of[doorbell.sender], doorbell.seq))

    # ---- what it does --------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Its engine, or whatever else, went wrong."""
        if self.epoch.state is EpochState.RUNNING:
            self._perform(self.epoch.abort(reason))
            self._tell_failure(reason)

    def _meet(self) -> None:
        self.is_ready = True
        self._tell(lambda: self._rendezvous.ready(self.plan.consumer, self.name))

    def _start(self) -> None:
        assert self._next is not None
        self.number, self._next = self._next, None
        self._scattered, self._placed = [], {}
        self.epoch = ConsumerEpoch(self.plan.chunks, self.plan.num_slots, self.plan.lanes)
        early = self._mailbox.open(SESSION, self.number)
        self._perform(self.epoch.begin())
        for doorbell in early:
            self._ready(doorbell)

    def _heed(self) -> None:
        self._perform(self.epoch.abort("dropped" if self._told else "told"))

    def _perform(self, actions: Iterable[ConsumerAction]) -> None:
        for action in actions:
            if isinstance(action, PostRead):
                if (slot := self.plan.chunks[action.index].receive_slot) is not None:
                    self._slots[slot] = None
                self._reading[action.index] = self._served(action.index)
            elif isinstance(action, Scatter):
                self._to_enqueue.append(action.index)
            else:
                if self.in_flight:
                    self._violate(f"{action} with something in flight")
                if isinstance(action, Finished):
                    self._finish()

    def _finish(self) -> None:
        expected = [chunk.index for chunk in self.plan.chunks if not chunk.is_direct]
        num_chunks = len(self._scattered) + len(self._placed)
        if sorted(self._scattered) != expected or num_chunks < len(self.plan.chunks):
            self._violate(
                f"finished with chunks {self._scattered} scattered and {sorted(self._placed)} "
                f"placed, of {len(self.plan.chunks)}"
            )
        last: dict[int | str, int] = {}  # of each owner and module, whose chunks keep their order
        for index in self._scattered:
            chunk = self.plan.chunks[index]
            for key in dict.fromkeys((chunk.owner, *(copy.module for copy in chunk.placements))):
                if last.setdefault(key, index) > index:
                    self._violate(f"scattered chunk {index} of {key} after chunk {last[key]}")
                last[key] = index
        who, number = self.plan.consumer, self.number
        self._tell(lambda: self._rendezvous.commit(who, self.name, number))

    def _land(self, index: int) -> None:
        chunk = self.plan.chunks[index]
        posted, now = self._reading.pop(index), self._served(index)
        if chunk.receive_slot is None:
            self._placed[index] = posted == now == self._identity(index)
        else:
            self._slots[chunk.receive_slot] = now if now == posted else None
        self._landed.append(index)
        # The notification may overtake what the consumer itself sees of the READ.
        producer, seq = f"producer {chunk.owner}", chunk.serve.seq
        self.world.ring(self.number, self.name, producer, Kind.DONE, seq)

    def _fail_read(self, index: int) -> None:
        self.num_read_failures -= 1
        del self._reading[index]
        runs = self.epoch.state is EpochState.RUNNING
        self._perform(self.epoch.read_failed(index, "injected"))
        if runs:
            self._tell_failure("a READ failed")

    def _observe_read(self, index: int) -> None:
        self._landed.remove(index)
        self._perform(self.epoch.read_done(index))

    def _enqueue(self) -> None:
        index = self._to_enqueue.popleft()
        self._stream.append((index, self._holds(index)))
        self._perform(self.epoch.scatter_enqueued(index))

    def _give_back(self) -> None:
        self._perform(self.epoch.scatter_failed(self._to_enqueue.popleft(), "aborted"))

    def _run(self) -> None:
        index, was_right = self._stream.popleft()
        may_be_wrong = self.is_fenced or self.number in self._rendezvous.failures
        if not (was_right and self._holds(index)) and not may_be_wrong:
            self._violate(f"the scatter of chunk {index} found {self._held(index)} in its slot")
        self._scattered.append(index)
        self._ran.append(index)

    def _observe_scatter(self, index: int) -> None:
        self._ran.remove(index)
        self._perform(self.epoch.scatter_completed(index))

    def _complete_wrongly(self) -> None:
        """Report a scatter as completed that is not: it must be refused."""
        self._num_stale_events -= 1
        wrong = [index for index in range(len(self.plan.chunks)) if index not in self._ran]
        index = self.world.rng.choice(wrong or [-1])
        if any(index == enqueued for enqueued, _ in self._stream):
            return  # a driver cannot be told from the event: it was enqueued and says it is done
        try:
            self.epoch.scatter_completed(index)
        except ProtocolError:
            return
        self._violate(f"it took a wrong completion of chunk {index}")

    def _served(self, index: int) -> Identity | None:
        """What the chunk's serve slot, or the memory that it reads directly, holds now."""
        chunk = self.plan.chunks[index]
        slot = chunk.serve.serve_slot
        if slot is None:
            epoch = self.world.sources.get((chunk.owner, chunk.serve.group))
            return None if epoch is None else (epoch, *self._identity(index)[1:])
        return self.world.serve.get((chunk.owner, self._arenas[chunk.owner], slot))

    def _identity(self, index: int) -> Identity:
        chunk = self.plan.chunks[index]
        return (self.number, self.plan.digest, chunk.owner, chunk.serve.seq)

    def _held(self, index: int) -> Identity | None:
        """What the chunk's receive slot holds now."""
        slot = self.plan.chunks[index].receive_slot
        return None if slot is None else self._slots[slot]

    def _holds(self, index: int) -> bool:
        return self._held(index) == self._identity(index)
