"""The rendezvous of one job as a pure state machine: requests and liveness in, effects out.

It knows no clock, socket or thread: the driver numbers its connections, passes the time in, carries
the effects out, and calls `tick` no later than `next_deadline`. A request that cannot be answered
yet is kept, tried again after every change, and refused at its deadline with what is missing.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from rdt_plan import ConsumerId
from rdt_plan.records import EpochRecord, ProducerRecord
from rdt_transport.errors import RdtTransportError, RendezvousError, RendezvousTimeoutError
from rdt_transport.rendezvous.effects import Answer, Disconnect, Effect, Push, Refusal
from rdt_transport.rendezvous.epochs import EpochLedger
from rdt_transport.rendezvous.events import (
    Announced,
    ConsumerDropped,
    ConsumerLeft,
    ProducerLost,
    PushedEvent,
    SessionChanged,
)
from rdt_transport.rendezvous.requests import (
    AwaitClose,
    Begin,
    Commit,
    Drop,
    Fail,
    GetEpoch,
    GetJob,
    GetOffers,
    GetSubscription,
    Leave,
    ListSubscriptions,
    MakeOffers,
    Missing,
    Publish,
    Ready,
    Request,
    SetReplicas,
    Subscribe,
    Wait,
)
from rdt_transport.rendezvous.roster import Roster
from rdt_transport.rendezvous.sealed import SealedSubscription
from rdt_transport.rendezvous.settings import JobSettings

__all__ = ["JobState"]


class JobState:
    """One job. ``new_session`` makes a fresh session id (32 hex digits) each time it is called."""

    def __init__(self, job: str, settings: JobSettings, new_session: Callable[[], str]) -> None:
        self._lease_seconds = settings.lease_seconds
        self._roster = Roster(job, settings, new_session)
        self._ledger = EpochLedger()
        self._leases: dict[int, float] = {}  # when each client's lease ends
        self._waits: list[Wait] = []
        self._asking: set[tuple[ConsumerId, str, int]] | None = None  # see `_askers`
        self._served = False  # whether a consumer got the last of its offers just now
        self._effects: list[Effect] = []

    # ---- what the driver calls ---------------------------------------------------------------

    def connected(self, client: int, now: float, *, is_leased: bool = True) -> None:
        """A client has proved the token, or needs none and no lease."""
        self._leases[client] = now + self._lease_seconds if is_leased else inf

    def heard(self, client: int, now: float) -> None:
        """A sign of life: the client's lease starts anew."""
        if client in self._leases:
            self.connected(client, now)

    def request(
        self, client: int, call: int, request: Request, timeout_seconds: float, now: float
    ) -> list[Effect]:
        """A client asks; the answer may be among the effects of a later call."""
        if client not in self._leases:
            return []
        wait = Wait(client, call, request, timeout_seconds, now + timeout_seconds)
        self._waits.append(wait)
        self._asking = None
        if not self._try(wait, now):
            return []
        match request:  # which cannot end anybody's wait; there may be thousands of them
            case MakeOffers() if not self._served:
                return self._take()
            case GetJob() | ListSubscriptions() | GetSubscription() | GetOffers() | GetEpoch():
                return self._take()
        return self._settle(now)

    def lost(self, client: int, reason: str, now: float) -> list[Effect]:
        """The client's connection is gone: what it still holds is lost."""
        self._lose(client, reason)
        return self._settle(now)

    def tick(self, now: float) -> list[Effect]:
        """End the waits and the leases whose time has come."""
        for client in [client for client, ends in self._leases.items() if ends <= now]:
            reason = f"its lease of {self._lease_seconds:g} s ended without a heartbeat"
            self._effects.append(Disconnect(client, reason))
            self._lose(client, reason)
        return self._settle(now)

    def stalled(self, seconds: float) -> None:
        """The driver itself was stopped that long: no client's silence in it counts."""
        self._leases = {client: ends + seconds for client, ends in self._leases.items()}

    def next_deadline(self) -> float:
        """When `tick` has something to do, at the latest; infinity when nothing is pending."""
        return min([*self._leases.values(), *[each.deadline for each in self._waits]], default=inf)

    # ---- waits -------------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Effect]:
        """Answer every request that can be answered, until none can."""
        while any([self._try(wait, now) for wait in self._waits.copy()]):
            pass
        return self._take()

    def _take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _try(self, wait: Wait, now: float) -> bool:
        try:
            value = self._answer(wait.client, wait.request)
            if isinstance(value, Missing):
                if wait.deadline > now:
                    return False
                waited = f"{wait.request} waited {wait.timeout_seconds:g} s: {value.what()}"
                raise RendezvousTimeoutError(waited)
        except RdtTransportError as error:
            self._effects.append(Refusal(wait.client, wait.call, error))
        except Exception:  # a mistake of ours must not come back with every change from now on
            self._waits.remove(wait)
            raise
        else:
            self._effects.append(Answer(wait.client, wait.call, wait.request, value))
        self._waits.remove(wait)
        self._asking = None
        return True

    def _answer(self, client: int, request: Request) -> Any:
        match request:
            case Publish(record, manifest):
                return self._publish(client, record, manifest)
            case GetJob(known):
                return self._roster.job_record(known)
            case Subscribe(subscription, session):
                return self._subscribe(client, subscription, session)
            case ListSubscriptions():
                return tuple(sorted(self._roster.members))
            case GetSubscription(consumer):
                member = self._roster.members.get(consumer)
                return member and self._roster.visible(client, member.subscription)
            case MakeOffers(offers):
                self._served = any([self._roster.offer(offer) for offer in offers])
                return None
            case GetOffers(consumer, incarnation):
                return self._roster.offers(consumer, incarnation)
            case SetReplicas(replicas):
                gone = self._roster.set_replicas(replicas)
                return self._fence(gone, "its replica is none of the job's any more")
            case Ready(consumer, incarnation):
                self._roster.live_member(consumer, incarnation).ready = True
                return None
            case Begin(rank, epoch):
                return self._begin(rank, epoch)
            case GetEpoch(epoch):
                return self._ledger.find(epoch)
            case AwaitClose(rank, epoch):
                self._roster.check_rank(rank)
                asks = [wait.request for wait in self._waits]  # a deadline withdraws its request
                ranks = range(self._roster.settings.num_producers)
                late = [each for each in ranks if AwaitClose(each, epoch) not in asks]
                return self._ledger.end_of(epoch, late)
            case Commit(consumer, incarnation, epoch):
                return self._commit(consumer, incarnation, epoch)
            case Fail(epoch, reason):
                return self._announce(self._ledger.give_up(epoch, reason))
            case Drop(consumer, incarnation, reason, epoch):
                member = self._roster.members.get(consumer)
                is_live = member is not None and member.incarnation == incarnation
                if is_live and epoch not in self._ledger.failures:
                    self._fence(self._roster.replica_of(consumer), f"{consumer}: {reason}")
                return None
            case Leave():
                return self._leave(client)

    # ---- producers and consumers -------------------------------------------------------------

    def _publish(self, client: int, record: ProducerRecord, manifest: bytes) -> bool:
        if not manifest and not self._roster.has_manifest(record.manifest_digest):
            return True
        earlier = self._roster.last_session
        if self._roster.publish(client, record, manifest):
            assert self._roster.session is not None
            self._ledger = EpochLedger()
            if earlier is not None:
                self._announce(SessionChanged(self._roster.session))
        return False

    def _subscribe(
        self, client: int, subscription: SealedSubscription, session: str | None
    ) -> Missing | None:
        self._roster.check_version(subscription.head)
        if self._roster.session is None:
            return Missing(self._roster.missing_producers)
        if self._roster.subscribe(client, subscription, session):
            self._announce(Announced(subscription))
        return None

    def _lose(self, client: int, reason: str) -> None:
        if self._leases.pop(client, None) is None:
            return
        self._waits = [wait for wait in self._waits if wait.client != client]
        self._asking = None
        for rank in self._roster.ranks_of(client):
            self._lose_producer(rank, f"producer {rank} is lost: {reason}")
        for consumer in self._roster.consumers_of(client):
            if consumer in self._roster.members:  # its replica may just have fallen
                fallen = self._roster.replica_of(consumer)
                self._fence(fallen, f"consumer {consumer} is lost: {reason}")

    def _leave(self, client: int) -> None:
        for rank in self._roster.ranks_of(client):
            self._lose_producer(rank, f"producer {rank} left")
        for consumer in self._roster.consumers_of(client):
            if consumer not in self._roster.members:
                continue
            needed = not self._ledger.may_leave(consumer)
            going = self._roster.replica_of(consumer) if needed else [consumer]
            self._fence(going, f"consumer {consumer} left", leaving=consumer)

    def _lose_producer(self, rank: int, reason: str) -> None:
        self._roster.lose_producer(rank)
        self._announce(self._ledger.fail(reason))
        self._announce(ProducerLost(rank, reason))

    def _fence(
        self, consumers: Iterable[ConsumerId], reason: str, leaving: ConsumerId | None = None
    ) -> None:
        for consumer, incarnation in self._roster.remove(consumers, reason):
            if consumer == leaving:
                self._announce(ConsumerLeft(consumer, incarnation))
            else:
                self._announce(ConsumerDropped(consumer, incarnation, reason))
            if consumer != leaving or not self._ledger.may_leave(consumer):
                self._announce(self._ledger.drop(consumer, incarnation, reason))

    def _announce(self, event: PushedEvent | None) -> None:
        """Push to everybody; a subscription to the producers that it reads from only."""
        if isinstance(event, Announced):
            for client, visible in self._roster.audience(event.subscription):
                self._effects.append(Push(client, Announced(visible)))
        elif event is not None:
            self._effects += [Push(client, event) for client in self._leases]

    def _begin(self, rank: int, epoch: int) -> EpochRecord | Missing:
        roster, ledger = self._roster, self._ledger
        if roster.session is None:
            return Missing(roster.missing_producers)
        roster.check_rank(rank)
        if 0 < epoch <= ledger.last:
            return ledger.begin(rank, epoch)
        if epoch != ledger.last + 1:
            raise RendezvousError(
                f"producer {rank} begins epoch {epoch}, but the next epoch of session "
                f"{roster.session} is {ledger.last + 1}; epochs count from 1 in every session"
            )
        if missing := ledger.next_waits_for(roster.settings.num_producers):
            return missing
        if not (live := roster.ready_consumers()):
            return Missing(roster.missing_consumers)
        if rank > 0:  # the servers are rank 0's: before, it attaches again what fell
            return Missing(lambda: f"producer 0 has not begun epoch {epoch}")
        return ledger.open(roster.session, live, rank, roster.absent_from(live))

    def _commit(self, consumer: ConsumerId, incarnation: str, epoch: int) -> Missing | None:
        ledger = self._ledger
        if ledger.is_committed(consumer, incarnation, epoch):
            return None
        self._roster.live_member(consumer, incarnation)
        replica = ledger.replica_of(consumer, incarnation, epoch)
        askers = self._askers()
        if missing := [other for other in replica if (*other, epoch) not in askers]:
            return Missing(lambda: ledger.waiting_for(missing))
        ledger.commit(replica)
        return None

    def _askers(self) -> set[tuple[ConsumerId, str, int]]:
        """Who waits for a commit now: an ask is withdrawn by its deadline."""
        if self._asking is None:
            commits = [wait.request for wait in self._waits if isinstance(wait.request, Commit)]
            self._asking = {(each.consumer, each.incarnation, each.epoch) for each in commits}
        return self._asking
