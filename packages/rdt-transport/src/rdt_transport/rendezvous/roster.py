"""Who takes part in a job: its producers, its session, and the consumers of that session.

Pure: part of `JobState`. A client is the number of a connection.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

from rdt_plan import ConsumerId
from rdt_plan.records import JobRecord, ProducerRecord, Subscription
from rdt_plan.wire import WIRE_VERSION
from rdt_transport.errors import DisagreementError, RendezvousError, TornError
from rdt_transport.rendezvous._admission import check_subscription
from rdt_transport.rendezvous._disagreement import manifests_differ
from rdt_transport.rendezvous.member import Member
from rdt_transport.rendezvous.requests import Missing
from rdt_transport.rendezvous.sealed import SealedOffer, SealedSubscription
from rdt_transport.rendezvous.settings import JobSettings
from rdt_transport.rendezvous.versions import check_wire_version

__all__ = ["Roster"]


@dataclass(frozen=True, slots=True)
class _Published:
    record: ProducerRecord
    client: int


class Roster:
    """Producers by rank and consumers by id; at most one live incarnation of each.

    Attributes:
        replicas: the numbers of the job's deployments, whether they are here or not.
    """

    def __init__(self, job: str, settings: JobSettings, new_session: Callable[[], str]) -> None:
        self.job = job
        self.settings = settings
        self.session: str | None = None
        self.last_session: str | None = None
        self.replicas = frozenset(range(settings.num_replicas))
        self.members: dict[ConsumerId, Member] = {}
        self._new_session = new_session
        self._producers: dict[int, _Published] = {}
        self._ranks: dict[int, tuple[int, ...]] = {}  # that each client has published, ascending
        self._manifest = b""
        self._gone: dict[str, str] = {}  # incarnations that can never take part again, and why
        self._fallen: dict[int, str] = {}  # why each replica last lost a worker

    # ---- producers ---------------------------------------------------------------------------

    def publish(self, client: int, record: ProducerRecord, manifest: bytes) -> bool:
        """Admit a producer; True when it was the last one missing, so that a session begins."""
        published = _Published(record, client)
        if self._producers.get(record.rank) == published:
            return False
        self._check_producer(record, manifest)
        self._producers[record.rank] = published
        self._ranks[client] = tuple(sorted({*self.ranks_of(client), record.rank}))
        self._manifest = manifest or self._manifest
        if len(self._producers) < self.settings.num_producers:
            return False
        self.session = self.last_session = self._new_session()
        self.members.clear()
        return True

    def has_manifest(self, digest: str) -> bool:
        """Whether the producers here, which all agree, have published that manifest."""
        known = next(iter(self._producers.values()), None)
        return known is not None and known.record.manifest_digest == digest

    def _check_producer(self, record: ProducerRecord, manifest: bytes) -> None:
        self.check_rank(record.rank)
        known = self._producers.get(record.rank)
        if known is not None:
            raise DisagreementError(
                f"two trainers that disagree: producer {record.rank} is "
                f"{known.record.wire_name} ({known.record.incarnation}), which is alive, and "
                f"{record.wire_name} ({record.incarnation}) claims the same rank; give each "
                "trainer its own job name, or stop the first"
            )
        for _, other in sorted(self._producers.items()):
            if other.record.manifest_digest != record.manifest_digest:
                raise manifests_differ(other.record, self._manifest, record, manifest)

    def check_rank(self, rank: int) -> None:
        """Refuse a rank that the job does not have."""
        if not 0 <= rank < self.settings.num_producers:
            raise DisagreementError(
                f"producer {rank} is not one of the job's {self.settings.num_producers}; set "
                "num_producers to the number of trainer ranks that publish"
            )

    def lose_producer(self, rank: int) -> None:
        """Forget a producer; no session until its rank is published again."""
        client = self._producers.pop(rank).client
        self._ranks[client] = tuple(each for each in self._ranks[client] if each != rank)
        if not self._ranks[client]:
            del self._ranks[client]
        self.session = None

    def ranks_of(self, client: int) -> tuple[int, ...]:
        """The ranks that client has published."""
        return self._ranks.get(client, ())

    def missing_producers(self) -> str:
        """Who has not published, as a sentence."""
        missing = [r for r in range(self.settings.num_producers) if r not in self._producers]
        ranks = ", ".join(map(str, missing))
        return (
            f"producer {ranks} has not published"
            if len(missing) == 1
            else f"producers {ranks} have not published"
        )

    def job_record(self, known: str | None = None) -> JobRecord | Missing | None:
        """What a consumer builds its plan from; None if it is that of the session ``known``."""
        if self.session is None:
            return Missing(self.missing_producers)
        if self.session == known:
            return None
        settings = self.settings
        return JobRecord(
            job=self.job,
            session=self.session,
            wire_version=WIRE_VERSION,
            num_producers=settings.num_producers,
            num_slots=settings.num_slots,
            max_chunk_bytes=settings.chunk_bytes,
            lookahead=settings.lookahead,
            num_replicas=settings.num_replicas,
            producers=tuple(self._producers[rank].record for rank in sorted(self._producers)),
            manifest=self._manifest,
        )

    # ---- consumers ---------------------------------------------------------------------------

    def check_version(self, subscription: Subscription) -> None:
        """Refuse a consumer of another wire version; needs no session."""
        name = f"consumer {subscription.consumer}"
        check_wire_version(name, subscription.wire_version, WIRE_VERSION)

    def subscribe(self, client: int, subscription: SealedSubscription, session: str | None) -> bool:
        """Admit a consumer; False when that very subscription is there already."""
        consumer = subscription.head.consumer
        if session is not None and session != self.session:
            raise RendezvousError(
                f"consumer {consumer} planned for session {session}, but the job is in session "
                f"{self.session}: a producer came back; fetch the job again and subscribe again"
            )
        known = self.members.get(consumer)
        if known is not None and known.client == client and known.subscription == subscription:
            return False
        self._check_subscription(subscription, known)
        self.members[consumer] = Member(subscription, client)
        return True

    def _check_subscription(self, sealed: SealedSubscription, known: Member | None) -> None:
        new = sealed.head
        consumer = new.consumer
        if new.incarnation in self._gone:
            raise TornError(
                f"consumer {consumer}: incarnation {new.incarnation} is over "
                f"({self._gone[new.incarnation]}); subscribe again as a new one"
            )
        if known is not None:
            raise DisagreementError(
                f"consumer {consumer} is {known.subscription.head.wire_name} "
                f"({known.incarnation}), which is alive, and {new.wire_name} "
                f"({new.incarnation}) claims the same place; give each deployment its own replica"
            )
        mates = [self.members[each].subscription.head for each in self.replica_of(consumer)]
        check_subscription(sealed, self.settings, self.replicas, mates)

    def set_replicas(self, replicas: Iterable[int]) -> list[ConsumerId]:
        """Let the job have these; returns the members of those it has no more, to be removed."""
        before, self.replicas = self.replicas, frozenset(replicas)
        for newcomer in self.replicas - before:
            self._fallen.pop(newcomer, None)
        return [each for each in sorted(self.members) if each.replica not in self.replicas]

    def visible(self, client: int, subscription: SealedSubscription) -> SealedSubscription:
        """A producer sees the tables of its own ranks only; they are the bulk of a subscription."""
        ranks = self.ranks_of(client)
        if not ranks:
            return subscription
        return replace(
            subscription, tables=tuple(t for t in subscription.tables if t.owner in ranks)
        )

    def audience(
        self, subscription: SealedSubscription
    ) -> Iterator[tuple[int, SealedSubscription]]:
        """The clients of the producers that it reads from, each with what is visible to it."""
        tables = {table.owner: table for table in subscription.tables}
        for client, ranks in self._ranks.items():
            if seen := tuple(tables[rank] for rank in ranks if rank in tables):
                yield client, SealedSubscription(subscription.head, seen)

    def live_member(self, consumer: ConsumerId, incarnation: str) -> Member:
        """The member with that very incarnation; raises `TornError` when it is not live."""
        member = self.members.get(consumer)
        if member is None or member.incarnation != incarnation:
            why = self._gone.get(incarnation, "it is not subscribed in this session")
            raise TornError(
                f"consumer {consumer}: incarnation {incarnation} is not live ({why}); what it "
                "holds is torn until it subscribes again and completes a sync"
            )
        return member

    def offer(self, offer: SealedOffer) -> bool:
        """Keep a producer's offer, unless the consumer is gone: its producers are told of that.

        True when it was the last one owed. Raises `RendezvousError` when the producer's incarnation
        is over.
        """
        producer = self._producers.get(offer.rank)
        if producer is None or producer.record.incarnation != offer.producer_incarnation:
            raise RendezvousError(
                f"the offer to {offer.consumer} is of an earlier incarnation of producer "
                f"{offer.rank}; publish again"
            )
        member = self.members.get(offer.consumer)
        if member is None or member.incarnation != offer.consumer_incarnation:
            return False
        member.offers[offer.rank] = offer
        member.owed.discard(offer.rank)
        return not member.owed

    def offers(self, consumer: ConsumerId, incarnation: str) -> tuple[SealedOffer, ...] | Missing:
        """The offers of every owner in the consumer's tables, by rank."""
        if incarnation in self._gone:
            self.live_member(consumer, incarnation)  # raises the reason
        member = self.members.get(consumer)
        if member is None or member.incarnation != incarnation:
            raise RendezvousError(f"consumer {consumer} is not subscribed; subscribe (again) first")
        if missing := member.owed:
            ranks = ", ".join(map(str, sorted(missing)))
            return Missing(lambda: f"no offer of producer {ranks} for consumer {consumer}")
        return tuple(offer for _, offer in sorted(member.offers.items()))

    def remove(self, consumers: Iterable[ConsumerId], reason: str) -> list[tuple[ConsumerId, str]]:
        """Fence these members for ever; returns each with its incarnation."""
        removed = []
        for consumer in sorted(consumers):
            incarnation = self.members.pop(consumer).incarnation
            self._gone[incarnation] = self._fallen[consumer.replica] = reason
            removed.append((consumer, incarnation))
        return removed

    def replica_of(self, consumer: ConsumerId) -> list[ConsumerId]:
        """All subscribed workers of that consumer's replica."""
        return sorted(each for each in self.members if each.replica == consumer.replica)

    def consumers_of(self, client: int) -> tuple[ConsumerId, ...]:
        """The consumers that client has subscribed."""
        return tuple(c for c, member in sorted(self.members.items()) if member.client == client)

    def ready_consumers(self) -> tuple[tuple[ConsumerId, str], ...]:
        """Consumers whose whole replica is subscribed and ready, with their incarnations."""
        num_ready = Counter(c.replica for c, member in self.members.items() if member.ready)
        return tuple(
            (consumer, member.incarnation)
            for consumer, member in sorted(self.members.items())
            if num_ready[consumer.replica] == member.num_workers
        )

    def absent_from(self, live: Iterable[tuple[ConsumerId, str]]) -> dict[int, str]:
        """The job's replicas without a consumer in ``live``, each with a reason."""
        absent = self.replicas - {consumer.replica for consumer, _ in live}
        reasons = {each: self._fallen.get(each, "it is not attached") for each in sorted(absent)}
        return {each: f"it took no part: {reason}" for each, reason in reasons.items()}

    def _missing_of(self, replica: int, num_workers: int) -> Iterator[str]:
        for worker in range(num_workers):
            member = self.members.get(ConsumerId(replica, worker))
            if member is None:
                yield f"consumer r{replica}w{worker} has not subscribed"
            elif not member.ready:
                yield f"consumer r{replica}w{worker} is not ready"

    def missing_consumers(self) -> str:
        """Why no replica is ready, as a sentence."""
        members = sorted(self.members.items())
        sizes = {consumer.replica: member.num_workers for consumer, member in members}
        missing = chain.from_iterable(self._missing_of(*each) for each in sizes.items())
        named = [*islice(missing, 16), *("and more" for _ in islice(missing, 1))]
        return "no replica is ready: " + ("; ".join(named) or "no consumer has subscribed")
