"""A simulated consumer: its driver, its installer, and its receive slots."""

from collections import deque
from collections.abc import Iterable

from rdt_plan._simulated_world import SESSION, Identity, Step, World, address_of
from rdt_plan.consumer_epoch import ConsumerAction, ConsumerEpoch, PostRead, Scatter
from rdt_plan.doorbell import Doorbell, Kind
from rdt_plan.epoch import EpochState
from rdt_plan.errors import ProtocolError
from rdt_plan.mailbox import Mailbox, Verdict
from rdt_plan.plan import SyncPlan

__all__ = ["SimulatedConsumer"]


class SimulatedConsumer:
    """Performs the actions of one `ConsumerEpoch`, each some time later.

    A receive slot is None from the posting of a READ until it lands, and a READ lands only what
    its serve slot held all the while. A scatter must find its chunk when it is enqueued and still
    when it runs: whoever overwrites a slot early is seen there.
    """

    def __init__(
        self, world: World, plan: SyncPlan, *, num_stale_events: int, num_read_failures: int
    ) -> None:
        self.world = world
        self.plan = plan
        self.address = address_of(self.name)
        self.epoch = ConsumerEpoch(plan.chunks, plan.num_slots)
        self.mailbox = Mailbox(plan.num_slots)
        self.dropped = False
        self.scattered: list[int] = []
        self._owner_of = {address_of(f"producer {owner}"): owner for owner in plan.owners}
        self._slots: list[Identity | None] = [None] * plan.num_slots
        self._reading: dict[int, Identity | None] = {}  # and what the serve slot held when posted
        self._landed: list[int] = []
        self._to_enqueue: deque[int] = deque()
        self._last_handed_out = -1
        self._stream: deque[tuple[int, bool]] = deque()  # and whether the slot was right so far
        self._ran: list[int] = []
        self._num_stale_events = num_stale_events
        self._num_read_failures = num_read_failures

    @property
    def name(self) -> str:
        return f"consumer {self.plan.consumer}"

    @property
    def is_over(self) -> bool:
        return self.epoch.state in (EpochState.FINISHED, EpochState.QUIESCED)

    @property
    def in_flight(self) -> bool:
        return bool(self._reading or self._landed or self._to_enqueue or self._stream or self._ran)

    def steps(self) -> list[Step]:
        """Everything that could happen here next."""
        steps: list[Step] = []
        if self.epoch.state is EpochState.NEW:
            steps.append(self._begin)
        for index in self._reading:
            steps.append(lambda index=index: self._land(index))
            if self._num_read_failures:
                steps.append(lambda index=index: self._fail_read(index))
        for index in self._landed:
            steps.append(lambda index=index: self._observe_read(index))
        if self._to_enqueue:
            steps.append(self._enqueue)
            if self.epoch.state is EpochState.ABORTING:
                steps.append(self._give_back)
        if self._stream:
            steps.append(self._run)
        for index in self._ran:
            steps.append(lambda index=index: self._observe_scatter(index))
        if self._num_stale_events and steps:
            steps.append(self._complete_wrongly)
        return steps

    def deliver(self, doorbell: Doorbell) -> None:
        if self.mailbox.accept(doorbell) is Verdict.DELIVER:
            self._ring(doorbell)

    def abort(self, reason: str) -> None:
        self._perform(self.epoch.abort(reason))

    def _begin(self) -> None:
        early = self.mailbox.open(SESSION, 1)
        self._perform(self.epoch.begin())
        for doorbell in early:
            self._ring(doorbell)

    def _ring(self, doorbell: Doorbell) -> None:
        self._perform(self.epoch.ready(self._owner_of[doorbell.sender], doorbell.seq))

    def _perform(self, actions: Iterable[ConsumerAction]) -> None:
        for action in actions:
            if isinstance(action, PostRead):
                self._slots[self.plan.chunks[action.index].receive_slot] = None
                self._reading[action.index] = self._served(action.index)
            elif isinstance(action, Scatter):
                if action.index < self._last_handed_out:
                    self.world.violations.append(
                        f"{self.name}: chunk {self._last_handed_out} was handed out before chunk "
                        f"{action.index}"
                    )
                self._last_handed_out = action.index
                self._to_enqueue.append(action.index)
            elif self.in_flight:
                self.world.violations.append(f"{self.name}: {action} with something in flight")

    def _land(self, index: int) -> None:
        chunk = self.plan.chunks[index]
        posted, now = self._reading.pop(index), self._served(index)
        self._slots[chunk.receive_slot] = now if now == posted else None
        self._landed.append(index)
        # The notification may overtake what the consumer itself sees of the READ.
        self.world.send(
            self.address, address_of(f"producer {chunk.owner}"), Kind.DONE, chunk.serve.seq
        )

    def _fail_read(self, index: int) -> None:
        self._num_read_failures -= 1
        del self._reading[index]
        self._perform(self.epoch.read_failed(index, "injected"))

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
        if not (was_right and self._holds(index)) and not self.dropped:
            slot = self.plan.chunks[index].receive_slot
            self.world.violations.append(
                f"{self.name}: the scatter of chunk {index} found {self._slots[slot]} in its slot"
            )
        self.scattered.append(index)
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
        self.world.violations.append(f"{self.name}: it took a wrong completion of chunk {index}")

    def _served(self, index: int) -> Identity | None:
        chunk = self.plan.chunks[index]
        return self.world.serve.get((chunk.owner, self.plan.consumer, chunk.serve.serve_slot))

    def _holds(self, index: int) -> bool:
        chunk = self.plan.chunks[index]
        identity = (self.plan.consumer, chunk.owner, chunk.serve.seq)
        return self._slots[chunk.receive_slot] == identity
