"""A simulated rendezvous: who takes part in which epoch, and who may commit it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rdt_plan._simulated_world import RENDEZVOUS, Live, World
from rdt_plan.identity import ConsumerId
from rdt_plan.table import ChunkTable

__all__ = ["Listener", "Member", "SimulatedRendezvous"]


class Listener(Protocol):
    """What every party hears, in the order in which it happened."""

    @property
    def name(self) -> str: ...

    def dropped(self, who: ConsumerId, incarnation: str) -> None: ...

    def failed(self, epoch: int) -> None: ...


class _Producer(Listener, Protocol):
    def subscribed(self, who: ConsumerId, incarnation: str, table: ChunkTable) -> None: ...

    def begin(self, epoch: int, live: Live) -> None: ...


class _Consumer(Listener, Protocol):
    def offered(self, rank: int, arena: int) -> None: ...

    def started(self, epoch: int, live: Live) -> None: ...

    def granted(self, epoch: int) -> None: ...


@dataclass
class Member:
    """A consumer incarnation that is subscribed."""

    party: _Consumer
    num_workers: int
    ready: bool = False


@dataclass
class SimulatedRendezvous:
    """One session. Calls arrive one at a time; what they cause is told in the parties' time.

    Attributes:
        members: the live incarnations.
        records: the frozen live set of each epoch.
        commits: who has committed each epoch.
        failures: why epochs were given up.
    """

    world: World
    needs_consumers: bool
    producers: dict[int, _Producer] = field(default_factory=dict)
    members: dict[ConsumerId, Member] = field(default_factory=dict)
    records: dict[int, Live] = field(default_factory=dict)
    commits: dict[int, set[ConsumerId]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    _live: dict[ConsumerId, str] = field(default_factory=dict)  # of the last epoch; it shrinks
    _begun: set[int] = field(default_factory=set)
    _begins: dict[int, int] = field(default_factory=dict)  # ranks that wait for an epoch
    _asked: set[tuple[ConsumerId, str, int]] = field(default_factory=set)

    @property
    def last(self) -> int:
        return len(self.records)

    @property
    def is_open(self) -> bool:
        """Whether somebody live in the last epoch has yet to commit it."""
        return self.last not in self.failures and any(
            who not in self.commits[self.last] for who in self._live
        )

    # ---- consumers -----------------------------------------------------------------------------

    def subscribe(
        self, who: ConsumerId, party: _Consumer, num_workers: int, tables: list[ChunkTable]
    ) -> None:
        if party.name in self.world.fenced:
            return
        self.members[who] = Member(party, num_workers)
        for table in tables:
            producer, name = self.producers[table.owner], party.name
            self._tell(producer, lambda p=producer, t=table, n=name: p.subscribed(who, n, t))

    def offer(self, who: ConsumerId, incarnation: str, rank: int, arena: int) -> None:
        if (member := self._member(who, incarnation)) is not None:
            self._tell(member.party, lambda: member.party.offered(rank, arena))

    def ready(self, who: ConsumerId, incarnation: str) -> None:
        if (member := self._member(who, incarnation)) is not None:
            member.ready = True
            self._open()

    def commit(self, who: ConsumerId, incarnation: str, epoch: int) -> None:
        """Granted to the workers of a replica at once; a refusal is not told."""
        self._asked.add((who, incarnation, epoch))
        replica = [live for live in self.records[epoch].items() if live[0].replica == who.replica]
        if not all((*live, epoch) in self._asked for live in replica):
            return
        if not self.may_commit(who, incarnation, epoch):
            return
        for other, name in replica:
            if name in self.world.fenced:
                self.world.violations.append(f"{name} was granted epoch {epoch} when fenced")
            self.commits[epoch].add(other)
            party = self.members[other].party if other in self.members else None
            if party is not None:
                self._tell(party, lambda p=party: p.granted(epoch))
        self._open()

    def may_commit(self, who: ConsumerId, incarnation: str, epoch: int) -> bool:
        is_last = epoch == self.last and epoch not in self.failures
        return is_last and self._live.get(who) == incarnation

    def drop(self, replica: int) -> None:
        """Fence a whole replica."""
        fallen = [(who, each) for who, each in self.members.items() if who.replica == replica]
        for who, member in fallen:
            name = member.party.name
            self.world.fenced.add(name)
            del self.members[who]
            for party in (*self.producers.values(), member.party):
                self._tell(party, lambda p=party, w=who, n=name: p.dropped(w, n))
        for who, member in fallen:
            if self._live.get(who) == member.party.name and who not in self.commits[self.last]:
                if len(self._live) == 1 and not self.commits[self.last]:
                    self._give_up("every consumer was dropped")
                del self._live[who]
        self._open()

    # ---- epochs --------------------------------------------------------------------------------

    def fail(self, epoch: int, reason: str) -> None:
        """Give an epoch up; one that is over stays as it is."""
        if epoch == self.last:
            self._give_up(reason)
            self._open()

    def _give_up(self, reason: str) -> None:
        if self.is_open:
            epoch = self.last
            self.failures[epoch] = reason
            for party in (*self.producers.values(), *(m.party for m in self.members.values())):
                self._tell(party, lambda p=party: p.failed(epoch))

    def begin(self, rank: int, epoch: int) -> None:
        self._begins[rank] = epoch
        self._open()

    def _open(self) -> None:
        """Answer whoever waits for an epoch that is open, or that may open now."""
        for rank, epoch in list(self._begins.items()):
            if epoch > self.last and not self._opens_next():
                continue
            if epoch == self.last:
                self._begun.add(rank)
            del self._begins[rank]
            producer, live = self.producers[rank], self.records[epoch]
            self._tell(producer, lambda p=producer, e=epoch, v=live: p.begin(e, v))

    def _opens_next(self) -> bool:
        """Open the next epoch, unless the last one is not over; joins take effect here."""
        late = self.last > 0 and len(self._begun) < len(self.producers)
        if self.last and (self.is_open or (late and self.last not in self.failures)):
            return False
        live = {
            who: member.party.name for who, member in self.members.items() if self._is_whole(who)
        }
        if not live and self.needs_consumers:
            return False
        self._live, self._begun = live, set()
        self.records[self.last + 1] = dict(live)
        self.commits[self.last] = set()
        epoch, record = self.last, self.records[self.last]
        for who in live:
            party = self.members[who].party
            self._tell(party, lambda p=party: p.started(epoch, record))
        return True

    def _is_whole(self, who: ConsumerId) -> bool:
        """Whether every worker of that replica is ready."""
        replica = [each for c, each in self.members.items() if c.replica == who.replica]
        return sum(each.ready for each in replica) == replica[0].num_workers

    def _member(self, who: ConsumerId, incarnation: str) -> Member | None:
        member = self.members.get(who)
        return member if member is not None and member.party.name == incarnation else None

    def _tell(self, party: Listener, what: Callable[[], None]) -> None:
        self.world.tell(RENDEZVOUS, party.name, what)
