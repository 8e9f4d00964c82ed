"""A whole fleet in one loop: consumers against producers, under a seeded random scheduler.

Every party's next step, every message under way and every injected fault is one option; the
scheduler picks among them, with weights that make some parties and channels much slower than
others. Messages between one pair keep their order, as a wire keeps it, but for duplicates.

It finds: waits that nobody can end, slots that were reused early (a scatter finds the wrong chunk
in its slot), lost chunks, groups that are resident beyond the lookahead or never released, an end
that is announced with something in flight, and any event that a role refuses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from rdt_plan._simulated_consumer import SimulatedConsumer
from rdt_plan._simulated_producer import SimulatedProducer
from rdt_plan._simulated_world import Step, World
from rdt_plan.epoch import EpochState
from rdt_plan.errors import RdtPlanError
from rdt_plan.identity import ConsumerId
from rdt_plan.plan import SyncPlan

__all__ = ["Faults", "Report", "simulate"]

_WEIGHTS = (1, 10, 100)


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in a simulation, at random moments.

    Attributes:
        drops: consumers that are dropped.
        num_aborts: times that some party aborts; it tells the others, who learn of it later.
        num_read_failures: READs that fail, at most, at each consumer.
        num_stale_events: scatters that each consumer's driver wrongly reports as completed.
        duplicate_rate: how likely a message comes again, below 1.
    """

    drops: tuple[ConsumerId, ...] = ()
    num_aborts: int = 0
    num_read_failures: int = 0
    num_stale_events: int = 0
    duplicate_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """How a simulation went; nothing went wrong when ``violations`` is empty.

    Attributes:
        num_steps: steps taken.
        violations: what went wrong, as text; it stops at the first step that goes wrong.
        consumers: the state each consumer ended in.
        producers: the state each producer ended in, by rank.
        max_resident: most groups that were resident on one rank at a time.
    """

    num_steps: int
    violations: tuple[str, ...]
    consumers: Mapping[ConsumerId, EpochState]
    producers: Mapping[int, EpochState]
    max_resident: int


def simulate(
    plans: Sequence[SyncPlan],
    groups: Mapping[int, Sequence[int]],
    *,
    lookahead: int,
    seed: int,
    faults: Faults | None = None,
    max_steps: int = 100_000,
) -> Report:
    """Run one epoch of the whole fleet.

    Args:
        plans: one a consumer.
        groups: by rank, the gather groups it gathers, in the order in which it does.
        lookahead: published groups that may be unreleased beyond the oldest one.
        seed: of the scheduler; equal seeds give equal runs.
        faults: what goes wrong.
        max_steps: a longer run is a violation.

    Raises `PlanError` when the plans do not fit the groups.
    """
    return _Simulation(plans, groups, lookahead, seed, faults or Faults()).run(max_steps)


class _Simulation:
    def __init__(
        self,
        plans: Sequence[SyncPlan],
        groups: Mapping[int, Sequence[int]],
        lookahead: int,
        seed: int,
        faults: Faults,
    ) -> None:
        self.rng = Random(seed)
        self.world = World(self.rng, faults.duplicate_rate)
        self.consumers = [
            SimulatedConsumer(
                self.world,
                plan,
                num_stale_events=faults.num_stale_events,
                num_read_failures=faults.num_read_failures,
            )
            for plan in plans
        ]
        addresses = {consumer.plan.consumer: consumer.address for consumer in self.consumers}
        self.producers = [
            SimulatedProducer(
                self.world,
                rank,
                {plan.consumer: plan.table(rank) for plan in plans if rank in plan.owners},
                addresses,
                groups[rank],
                lookahead,
            )
            for rank in sorted(groups)
        ]
        self.parties = [*self.consumers, *self.producers]
        self.party_of = {party.address: party for party in self.parties}
        self.ranks_of = {
            group: [producer for producer in self.producers if group in producer.groups]
            for each in groups.values()
            for group in each
        }
        self.notices: list[Step] = []  # news on its way to one party
        self.told = False  # of an abort
        horizon = 10 * sum(len(plan.chunks) for plan in plans) + 10
        strikes = [partial(self._drop, consumer) for consumer in faults.drops]
        strikes += [self._abort] * faults.num_aborts
        self.strikes = sorted(
            ((self.rng.randrange(horizon), strike) for strike in strikes), key=lambda each: each[0]
        )
        self.weights: dict[object, int] = {}

    def run(self, max_steps: int) -> Report:
        num_steps = 0
        while not self.world.violations:
            options = self._options(num_steps)
            if not options:
                break
            if num_steps >= max_steps:
                self.world.violations.append(f"not over after {max_steps} steps")
                break
            num_steps += 1
            [step] = self.rng.choices(
                [s for _, s in options], [self._weight(k) for k, _ in options]
            )
            try:
                step()
            except RdtPlanError as error:
                self.world.violations.append(f"{type(error).__name__}: {error}")
            self._spread_abort()
        if not self.world.violations:
            self._check_end()
        return Report(
            num_steps=num_steps,
            violations=tuple(self.world.violations),
            consumers={each.plan.consumer: each.epoch.state for each in self.consumers},
            producers={each.rank: each.epoch.state for each in self.producers},
            max_resident=max((each.max_resident for each in self.producers), default=0),
        )

    def _options(self, num_steps: int) -> list[tuple[object, Step]]:
        options: list[tuple[object, Step]] = []
        for consumer in self.consumers:
            options += [(consumer.address, step) for step in consumer.steps()]
        for producer in self.producers:
            options += [(producer.address, step) for step in producer.steps(self.ranks_of)]
        for channel, messages in self.world.channels.items():
            if messages:
                options.append((channel, partial(self._deliver, channel)))
        options += [(notice, partial(self._notify, notice)) for notice in self.notices]
        if self.strikes and (num_steps >= self.strikes[0][0] or not options):
            return [("strike", self._strike)]
        return options

    def _weight(self, key: object) -> int:
        if key not in self.weights:
            self.weights[key] = self.rng.choice(_WEIGHTS)
        return self.weights[key]

    def _deliver(self, channel: tuple[bytes, bytes]) -> None:
        doorbell = self.world.receive(channel)
        self.party_of[doorbell.receiver].deliver(doorbell)

    def _notify(self, notice: Step) -> None:
        self.notices.remove(notice)
        notice()

    def _strike(self) -> None:
        _, strike = self.strikes.pop(0)
        strike()

    def _drop(self, consumer: ConsumerId) -> None:
        """Every producer that serves it, and the consumer itself, learn of it in their time."""
        [dropped] = [each for each in self.consumers if each.plan.consumer == consumer]
        dropped.dropped = True
        self.notices.append(partial(dropped.abort, "dropped"))
        for producer in self.producers:
            if producer.rank in dropped.plan.owners:
                self.notices.append(partial(producer.drop, consumer))

    def _abort(self) -> None:
        self.rng.choice(self.parties).abort("injected")

    def _spread_abort(self) -> None:
        aborted = [
            party
            for party in self.parties
            if party.epoch.state in (EpochState.ABORTING, EpochState.QUIESCED)
            and not (isinstance(party, SimulatedConsumer) and party.dropped)
        ]
        if aborted and not self.told:
            self.told = True
            self.notices += [partial(p.abort, "told") for p in self.parties if p not in aborted]

    def _check_end(self) -> None:
        stuck = [party for party in self.parties if not party.is_over]
        if stuck:
            waits = "; ".join(f"{each.name} waits for {each.epoch.waiting_for()}" for each in stuck)
            self.world.violations.append(f"nothing can happen any more: {waits}")
        for consumer in self.consumers:
            chunks = list(range(len(consumer.plan.chunks)))
            finished = consumer.epoch.state is EpochState.FINISHED
            if finished and sorted(consumer.scattered) != chunks:
                self.world.violations.append(
                    f"{consumer.name}: finished with chunks {sorted(consumer.scattered)} scattered "
                    f"of {len(chunks)}"
                )
