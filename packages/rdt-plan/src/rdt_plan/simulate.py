"""A whole fleet in one loop: consumers against producers, under a seeded random scheduler.

Every party's next step, every message under way and every injected fault is one option; the
scheduler picks among them, with weights that make some parties and channels much slower than
others. Messages between one pair keep their order, as a wire keeps it, but for duplicates; what
the rendezvous tells one party keeps its order, and may be overtaken by doorbells.

It finds: waits that nobody can end, slots that were reused early (a scatter finds the wrong chunk
in its slot), sources that changed while they were read directly, lost chunks, chunks out of order,
groups that are resident beyond the lookahead, read after their release or never released, an end
that is announced with something in flight, a commit by a fenced incarnation, an epoch that a live
consumer neither committed nor was told the failure of, and any event that a role refuses.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from rdt_plan._simulated_consumer import SimulatedConsumer
from rdt_plan._simulated_producer import SimulatedProducer
from rdt_plan._simulated_rendezvous import SimulatedRendezvous
from rdt_plan._simulated_world import Step, World
from rdt_plan.epoch import EpochState
from rdt_plan.errors import RdtPlanError
from rdt_plan.identity import ConsumerId
from rdt_plan.plan import SyncPlan

__all__ = ["Faults", "Report", "SimulatedRendezvous", "simulate"]

_WEIGHTS = (1, 10, 100)
_STEPS_OF_A_CHUNK = 20  # at both ends together, with its messages: 11 when nothing goes wrong
_STEPS_OF_A_PARTY = 30  # in each epoch, with its gathers' shares


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in a simulation, at random moments.

    Attributes:
        drops: replicas that are dropped, each time they are named.
        rejoin: whether the workers of a dropped replica subscribe again, as new incarnations.
        num_aborts: times that some party gives up (an engine, or a source, that raised).
        num_read_failures: times that some consumer's next READ may fail.
        num_pack_failures: times that some producer's next pack may fail.
        num_replacements: epochs in which some producer's standing tensors are not what they were.
        num_stale_events: scatters that each consumer's driver wrongly reports as completed.
        duplicate_rate: how likely a doorbell comes again, below 1.
    """

    drops: tuple[int, ...] = ()
    rejoin: bool = False
    num_aborts: int = 0
    num_read_failures: int = 0
    num_pack_failures: int = 0
    num_replacements: int = 0
    num_stale_events: int = 0
    duplicate_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """How a simulation went; nothing went wrong when ``violations`` is empty.

    Attributes:
        num_steps: steps taken.
        violations: what went wrong, as text; it stops at the first step that goes wrong.
        consumers: the state that each consumer's last incarnation ended in.
        producers: the state each producer ended in, by rank.
        commits: who committed, by epoch.
        failures: the epochs that were given up, and why.
        max_resident: most groups that were resident on one rank at a time, but for standing ones.
        num_packs: packs that were started.
        num_doorbells: that each consumer's last incarnation was sent, or sent.
    """

    num_steps: int
    violations: tuple[str, ...]
    consumers: Mapping[ConsumerId, EpochState]
    producers: Mapping[int, EpochState]
    commits: Mapping[int, frozenset[ConsumerId]]
    failures: Mapping[int, str]
    max_resident: int
    num_packs: int
    num_doorbells: Mapping[ConsumerId, int]


def simulate(
    plans: Sequence[SyncPlan],
    groups: Mapping[int, Sequence[int]],
    *,
    lookahead: int,
    seed: int,
    num_epochs: int = 1,
    faults: Faults | None = None,
    max_steps: int | None = None,
    rendezvous: type[SimulatedRendezvous] | None = None,
    standing: Mapping[int, Collection[int]] | None = None,
) -> Report:
    """Run the whole fleet through ``num_epochs`` epochs, those that are given up included.

    Args:
        plans: one a consumer, all workers of every replica. Equal plans share their rings.
        groups: by rank, the gather groups it gathers, in the order in which it does.
        lookahead: published groups that may be unreleased beyond the oldest one.
        seed: of the scheduler; equal seeds give equal runs.
        num_epochs: epochs that every producer begins.
        faults: what goes wrong.
        max_steps: a longer run is a violation; None: a bound that grows with the plans only.
        rendezvous: another one than `SimulatedRendezvous`.
        standing: by rank, the groups whose tensors are there anyway.

    Raises `PlanError` when the plans do not fit the groups.
    """
    meeting = SimulatedRendezvous if rendezvous is None else rendezvous
    fleet = _Simulation(
        plans, groups, lookahead, seed, num_epochs, faults or Faults(), meeting, standing or {}
    )
    return fleet.run(fleet.bound() if max_steps is None else max_steps)


class _Simulation:
    def __init__(
        self,
        plans: Sequence[SyncPlan],
        groups: Mapping[int, Sequence[int]],
        lookahead: int,
        seed: int,
        num_epochs: int,
        faults: Faults,
        rendezvous: type[SimulatedRendezvous],
        standing: Mapping[int, Collection[int]],
    ) -> None:
        self.rng = Random(seed)
        self.faults = faults
        self.plans = plans
        self.num_epochs = num_epochs
        self.world = World(self.rng, faults.duplicate_rate)
        self.rendezvous = rendezvous(self.world, needs_consumers=bool(plans))
        self.producers = [
            SimulatedProducer(
                self.world,
                self.rendezvous,
                rank,
                groups[rank],
                lookahead,
                num_epochs=num_epochs,
                num_slots=max((plan.num_slots for plan in plans), default=1),
                standing=standing.get(rank, ()),
            )
            for rank in sorted(groups)
        ]
        self.rendezvous.producers.update({each.rank: each for each in self.producers})
        self.consumers: list[SimulatedConsumer] = []
        self._join({plan.consumer.replica for plan in plans})
        self.ranks_of = {
            group: [producer for producer in self.producers if group in producer.groups]
            for each in groups.values()
            for group in each
        }
        horizon = 11 * num_epochs * sum(len(plan.chunks) for plan in plans) + 10
        strikes = [partial(self._drop, replica) for replica in faults.drops]
        strikes += [self._abort] * faults.num_aborts
        strikes += [self._fail_read] * faults.num_read_failures
        strikes += [self._fail_pack] * faults.num_pack_failures
        strikes += [self._replace] * faults.num_replacements
        self.strikes = sorted(
            ((self.rng.randrange(horizon), strike) for strike in strikes), key=lambda each: each[0]
        )
        self.weights: dict[object, int] = {}
        self.patient = self.rng.random() < 0.5  # the trainer lets everybody join first

    def bound(self) -> int:
        """Steps within which a run must be over: a few times what any run needs."""
        num_joins = 1 + len(self.faults.drops)
        num_chunks = sum(len(plan.chunks) for plan in self.plans)
        num_gathers = sum(len(producer.groups) for producer in self.producers)
        num_parties = len(self.plans) * num_joins + len(self.producers) + 1
        each = _STEPS_OF_A_CHUNK * num_chunks + 4 * num_gathers + _STEPS_OF_A_PARTY * num_parties
        wrong = self.faults.num_stale_events * len(self.plans) * num_joins
        return round((self.num_epochs * each + wrong) / (1 - self.faults.duplicate_rate)) + 100

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
        if not self.world.violations:
            self._check_end()
        return Report(
            num_steps=num_steps,
            violations=tuple(self.world.violations),
            consumers={each.plan.consumer: each.epoch.state for each in self.consumers},
            producers={each.rank: each.epoch.state for each in self.producers},
            commits={epoch: frozenset(who) for epoch, who in self.rendezvous.commits.items()},
            failures=dict(self.rendezvous.failures),
            max_resident=max((each.max_resident for each in self.producers), default=0),
            num_packs=sum(each.num_packs for each in self.producers),
            num_doorbells={
                e.plan.consumer: self.world.num_doorbells[e.name] for e in self.consumers
            },
        )

    def _options(self, num_steps: int) -> list[tuple[object, Step]]:
        options: list[tuple[object, Step]] = []
        for consumer in self.consumers:
            options += [(consumer.name, step) for step in consumer.steps()]
        may_ask = not self.patient or bool(self.rendezvous.records) or self._all_are_ready()
        for producer in self.producers:
            steps = producer.steps(self.ranks_of, may_ask=may_ask)
            # Looking at standing tensors may take much longer, or less, than what else it does.
            options += [((producer.name, step == producer.confirm), step) for step in steps]
        for channel, messages in self.world.channels.items():
            if messages:
                options.append((channel, partial(self.world.pass_on, channel)))
        if self.strikes and (num_steps >= self.strikes[0][0] or not options):
            return [("strike", self._strike)]
        return options

    def _all_are_ready(self) -> bool:
        return all(each.is_ready or each.is_fenced for each in self.consumers)

    def _weight(self, key: object) -> int:
        if key not in self.weights:
            self.weights[key] = self.rng.choice(_WEIGHTS)
        return self.weights[key]

    def _strike(self) -> None:
        _, strike = self.strikes.pop(0)
        strike()

    def _join(self, replicas: set[int]) -> None:
        """A new incarnation of every worker of these replicas."""
        for plan in self.plans:
            if plan.consumer.replica in replicas:
                mates = [p for p in self.plans if p.consumer.replica == plan.consumer.replica]
                before = [each for each in self.consumers if each.plan is plan]
                consumer = SimulatedConsumer(
                    self.world,
                    self.rendezvous,
                    plan,
                    len(before),
                    len(mates),
                    num_stale_events=self.faults.num_stale_events,
                )
                self.consumers.append(consumer)

    def _drop(self, replica: int) -> None:
        """The rendezvous fences it at once; everybody hears of it in their time."""
        for consumer in self.consumers:
            if consumer.plan.consumer.replica == replica:
                self.world.fenced.add(consumer.name)
        self.rendezvous.drop(replica)
        if self.faults.rejoin:
            self._join({replica})

    def _live(self) -> list[SimulatedConsumer]:
        return [each for each in self.consumers if not each.is_fenced]

    def _abort(self) -> None:
        self.rng.choice([*self._live(), *self.producers]).abort("injected")

    def _fail_read(self) -> None:
        for consumer in self.rng.sample(self._live(), min(1, len(self._live()))):
            consumer.num_read_failures += 1

    def _fail_pack(self) -> None:
        self.rng.choice(self.producers).num_pack_failures += 1

    def _replace(self) -> None:
        self.rng.choice(self.producers).num_replacements += 1

    def _check_end(self) -> None:
        may_begin = not self.plans or any(not each.is_fenced for each in self.consumers)
        stuck = [p for p in self.producers if not p.is_over or (may_begin and p.waits_to_begin)]
        stuck += [c for c in self.consumers if not (c.is_over and (c.is_ready or c.is_fenced))]
        if stuck:
            waits = "; ".join(f"{each.name} waits for {each.waiting_for()}" for each in stuck)
            self.world.violations.append(f"nothing can happen any more: {waits}")
        for epoch, live in self.rendezvous.records.items():
            missing = [
                name for who, name in live.items() if who not in self.rendezvous.commits[epoch]
            ]
            missing = [name for name in missing if name not in self.world.fenced]
            if missing and epoch not in self.rendezvous.failures:
                self.world.violations.append(f"epoch {epoch} was never committed by {missing}")
