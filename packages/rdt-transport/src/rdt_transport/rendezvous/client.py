"""The rendezvous, as producers and consumers call it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType

from rdt_plan import WIRE_VERSION, ChunkTable, ConsumerId, Manifest, encode_manifest
from rdt_plan.collector import collector_paused
from rdt_plan.records import EpochRecord, JobRecord, Offer, ProducerRecord, Subscription
from rdt_transport.errors import RendezvousProtocolError
from rdt_transport.rendezvous._link import Link, Listen
from rdt_transport.rendezvous._names import Names
from rdt_transport.rendezvous._socket_link import SocketLink
from rdt_transport.rendezvous.address import RendezvousAddress
from rdt_transport.rendezvous.events import (
    Announced,
    ConnectionLost,
    PushedEvent,
    RendezvousEvent,
    Subscribed,
)
from rdt_transport.rendezvous.outcome import EpochOutcome
from rdt_transport.rendezvous.packing import pack, unpack
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
    Publish,
    Ready,
    SetReplicas,
    Subscribe,
)
from rdt_transport.rendezvous.sealed import SealedOffer, SealedSubscription, SealedTable
from rdt_transport.rendezvous.versions import check_wire_version

__all__ = ["RendezvousClient"]

CALL_TIMEOUT_SECONDS = 30.0  # of calls that wait for nobody
MAX_OPENED = 64  # chunk tables that are kept, so that those of equal workers are opened once


class RendezvousClient:
    """One process's connection to its job's rendezvous. Blocking, thread-safe.

    The connection carries the lease of whatever was published or subscribed over it: closing it
    without `leave`, or its process dying, loses those producers and drops those consumers.

    Every call raises `RendezvousTimeoutError` at its deadline, naming what is missing, and
    `RendezvousLostError` at once when the connection is gone; both are `RendezvousError`. It is
    never reopened: make a new client, and publish or subscribe as a new incarnation.

    Args:
        address: where, which job, and the token.
        on_event: called with each event, in order, on a thread of this client's own; it may call
            the client, and while it runs no further event is delivered. Exceptions are logged.
        connect_timeout_seconds: for the connection and the proof of the token.
        connect: makes another connection than one over TCP: see `LocalHost.connect`.

    Raises:
        TokenError: this process or the server did not prove the token.
        VersionMismatchError: the server speaks another version of the protocol.
        RendezvousLostError: nobody listens there.
    """

    def __init__(
        self,
        address: RendezvousAddress,
        *,
        on_event: Callable[[RendezvousEvent], None] | None = None,
        connect_timeout_seconds: float = CALL_TIMEOUT_SECONDS,
        connect: Callable[[Listen | None], Link] | None = None,
    ) -> None:
        self.address = address
        self._session: str | None = None
        self._incarnations: dict[ConsumerId, str] = {}  # as subscribed here
        self._opened: dict[SealedTable, ChunkTable] = {}
        self._job: JobRecord | None = None
        self._names = Names()
        self._on_event = on_event
        listen = None if on_event is None else self._listen
        connect = connect or (lambda on: SocketLink(address, on, connect_timeout_seconds))
        self._link = connect(listen)

    def _listen(self, event: PushedEvent | ConnectionLost) -> None:
        """On the event thread."""
        assert self._on_event is not None
        if not isinstance(event, Announced):
            self._on_event(event)
        elif (subscription := self._open(event.subscription)) is not None:
            self._on_event(Subscribed(subscription))

    def _open(self, sealed: SealedSubscription) -> Subscription | None:
        """What a consumer sent; one whose tables cannot be read is dropped."""
        try:
            return sealed.open(self._opened, self._names.in_order())
        except RendezvousProtocolError as error:
            head = sealed.head
            self.drop(head.consumer, head.incarnation, f"its subscription is malformed: {error}")
            return None
        finally:
            for oldest in list(self._opened)[:-MAX_OPENED]:
                self._opened.pop(oldest, None)

    def know(self, manifest: Manifest) -> None:
        """Take the job's manifest from whoever has it, so that it need not be decoded here."""
        self._names.learn(manifest)

    def numbers(self) -> Mapping[str, int]:
        """Positions of the names of the manifest that was published or fetched here last."""
        return self._names.numbers()

    @property
    def num_messages(self) -> int:
        """Messages to and from the rendezvous so far, but for heartbeats."""
        return self._link.num_messages

    # ---- producers ---------------------------------------------------------------------------

    def publish(
        self, record: ProducerRecord, manifest: Manifest | bytes, timeout_seconds: float
    ) -> None:
        """Announce a producer and the manifest of the whole model, which may be encoded already.

        Raises `DisagreementError` when a live producer has the rank or another manifest.
        """
        self._names.learn(manifest)
        if self._link.call(Publish(record, b""), timeout_seconds):  # nobody has sent it yet
            encoded = manifest if isinstance(manifest, bytes) else encode_manifest(manifest)
            self._link.call(Publish(record, pack(encoded)), timeout_seconds)

    def consumers(self, timeout_seconds: float) -> tuple[ConsumerId, ...]:
        """Who is subscribed now, in order."""
        return self._link.call(ListSubscriptions(), timeout_seconds)

    def subscriptions(self, timeout_seconds: float) -> list[Subscription]:
        """The consumers subscribed now; a producer's client sees its own ranks' tables only."""
        return list(self.iter_subscriptions(timeout_seconds))

    def iter_subscriptions(self, timeout_seconds: float) -> Iterator[Subscription]:
        """The same, each fetched when it is asked for: those of a large fleet fill memory."""
        consumers = self.consumers(timeout_seconds)
        if consumers and not self._names.in_order():
            self.job(timeout_seconds)  # whose manifest numbers the names
        for consumer in consumers:
            sealed = self._link.call(GetSubscription(consumer), timeout_seconds)
            if sealed is not None and (subscription := self._open(sealed)) is not None:
                yield subscription

    def set_replicas(
        self, replicas: Iterable[int], timeout_seconds: float = CALL_TIMEOUT_SECONDS
    ) -> None:
        """Say which replicas the job has from now on, attached or not; for whoever drives them.

        An epoch's outcome names all of them. Consumers of others are refused, and fenced where they
        are subscribed: an epoch that is open goes on without them.
        """
        self._link.call(SetReplicas(tuple(sorted(replicas))), timeout_seconds)

    def offer(self, offers: Iterable[Offer], timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> None:
        """Offer consumers their serve rings; those whose incarnation is gone get nothing.

        Raises `RendezvousError` when the producer's own incarnation is over.
        """
        self._link.call(MakeOffers(tuple(map(SealedOffer.seal, offers))), timeout_seconds)

    def begin(self, rank: int, epoch: int, timeout_seconds: float) -> EpochRecord:
        """Rank 0 opens ``epoch``, others learn its record: the same for all, whatever fell since.

        Waits for all producers, for a ready replica, and for the epoch before: until it failed, or
        every rank has begun it and everybody live in it has committed it or was dropped. Epochs
        count from 1 in each session.

        Raises `EpochFailedError` when it has failed already: end it as an abort ends one.
        """
        return self._link.call(Begin(rank, epoch), timeout_seconds)

    def await_close(self, rank: int, epoch: int, timeout_seconds: float) -> EpochOutcome:
        """How ``epoch`` ended, told to all ranks alike once every rank asks.

        Waits until everybody live in it has committed it or was dropped. Until all ranks have
        asked, any of them may still `fail` it, or `drop` a replica that has committed.

        Raises `EpochFailedError` when it failed instead: by a party, or by losing every replica.
        """
        return self._link.call(AwaitClose(rank, epoch), timeout_seconds)

    # ---- consumers ---------------------------------------------------------------------------

    def job(self, timeout_seconds: float) -> JobRecord:
        """The job, once all producers have published. `subscribe` then holds to its session.

        Raises `VersionMismatchError` before anything of another wire version is decoded.
        """
        known = self._job
        record = self._link.call(GetJob(None if known is None else known.session), timeout_seconds)
        if record is not None:
            check_wire_version("this worker", WIRE_VERSION, record.wire_version)
            known = self._job = replace(record, manifest=unpack(record.manifest))
            self._names.learn(known.manifest)
        assert known is not None
        self._session = known.session
        return known

    def subscribe(self, subscription: Subscription, timeout_seconds: float) -> None:
        """Take part with a plan built for the job that `job` returned last.

        Raises `VersionMismatchError`, `DisagreementError` (the place is taken, or settings
        differ), `TornError` (that incarnation was dropped), `RendezvousError` (session changed).
        """
        with collector_paused():
            sealed = SealedSubscription.seal(subscription, self.numbers() or None)
        self._incarnations[subscription.consumer] = subscription.incarnation
        self._link.call(Subscribe(sealed, self._session), timeout_seconds)

    def offers(self, consumer: ConsumerId, timeout_seconds: float) -> tuple[Offer, ...]:
        """One offer of every owner in the consumer's tables, by rank, once all are there.

        For the consumer this client subscribed last; raises `TornError` with the reason when it was
        dropped, `RendezvousError` when it is not subscribed.
        """
        incarnation = self._incarnations.get(consumer, "")
        sealed = self._link.call(GetOffers(consumer, incarnation), timeout_seconds)
        return tuple(offer.open() for offer in sealed)

    def ready(
        self,
        consumer: ConsumerId,
        incarnation: str,
        timeout_seconds: float = CALL_TIMEOUT_SECONDS,
    ) -> None:
        """The consumer is attached and takes part from the next begin; `TornError` if dropped."""
        self._link.call(Ready(consumer, incarnation), timeout_seconds)

    def epoch_record(self, timeout_seconds: float, epoch: int | None = None) -> EpochRecord:
        """The open epoch's record; with ``epoch``, that one's.

        With ``epoch``, `EpochFailedError` or `RendezvousError` is raised at once when it has
        failed or is over; without, the call waits for an open one.
        """
        return self._link.call(GetEpoch(epoch), timeout_seconds)

    def commit(
        self, consumer: ConsumerId, incarnation: str, epoch: int, timeout_seconds: float
    ) -> None:
        """Accept ``epoch``; returns once all workers of the replica have asked.

        Raises `TornError` when the incarnation was dropped or the epoch failed.
        """
        self._link.call(Commit(consumer, incarnation, epoch), timeout_seconds)

    # ---- anybody -----------------------------------------------------------------------------

    def fail(self, epoch: int, reason: str, timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> None:
        """Give ``epoch`` up for everybody; nothing happens when its end has been told already."""
        self._link.call(Fail(epoch, reason), timeout_seconds)

    def drop(
        self,
        consumer: ConsumerId,
        incarnation: str,
        reason: str,
        timeout_seconds: float = CALL_TIMEOUT_SECONDS,
        *,
        epoch: int | None = None,
    ) -> None:
        """Fence the consumer's whole replica; nothing happens when the incarnation is gone.

        ``epoch`` is the one in which it failed: where that epoch has failed for everybody anyway,
        nobody is fenced.
        """
        self._link.call(Drop(consumer, incarnation, reason, epoch), timeout_seconds)

    def leave(self, timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> None:
        """Say goodbye for everything published or subscribed over this connection."""
        self._link.call(Leave(), timeout_seconds)

    def close(self) -> None:
        """Close the connection and join its threads. Idempotent; may be called by ``on_event``."""
        self._link.close()

    def __enter__(self) -> "RendezvousClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
