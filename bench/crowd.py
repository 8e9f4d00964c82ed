"""The rest of a job at its rendezvous: real frames over real sockets, hardly any work of its own.

What a party costs is measured in that party's process; everybody else is here, in one thread.
"""

import asyncio
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rdt_plan import ConsumerId, Offer, ProducerRecord, SlotRegion, Subscription
from rdt_transport.rendezvous import RendezvousAddress
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.messages import encode_message
from rdt_transport.rendezvous.packing import pack
from rdt_transport.rendezvous.protocol import encode_frame, introduce
from rdt_transport.rendezvous.sealed import SealedOffer, SealedSubscription

__all__ = ["SECONDS", "consumers", "incarnation", "producers"]

SECONDS = 600.0  # of every wait


def incarnation(number: int) -> str:
    """Of a producer by its rank, of a consumer by what comes after all ranks."""
    return f"{number:032x}"


class Peer:
    """One connection that reads frames, and decodes none but small ones."""

    def __init__(self) -> None:
        self.announced: asyncio.Queue[Any] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0

    async def open(self, address: RendezvousAddress) -> "Peer":
        self._reader, self._writer = await asyncio.open_connection(address.host, address.port)
        await introduce(self._reader, self._writer, address)
        self._task = asyncio.create_task(self._read())
        return self

    async def call(self, request: ask.Request) -> Any:
        """The answer's frame; raises `RuntimeError` for a refusal."""
        self._calls += 1
        answer = self._answers[self._calls] = asyncio.get_running_loop().create_future()
        frame = {"kind": "call", "call": self._calls, "timeout_seconds": SECONDS}
        self._writer.write(encode_frame({**frame, "request": encode_message(request)}))
        found = await asyncio.wait_for(answer, SECONDS)
        if found["kind"] != "answer":
            raise RuntimeError(str(found))
        return found["value"]

    async def _read(self) -> None:
        while True:
            (size,) = struct.unpack(">I", await self._reader.readexactly(4))
            frame = json.loads(await self._reader.readexactly(size))
            if frame["kind"] == "event":
                self.announced.put_nowait(frame["event"]["subscription"])
            else:
                self._answers.pop(frame["call"]).set_result(frame)

    def close(self) -> None:
        self._task.cancel()
        self._writer.close()


async def producers(
    address: RendezvousAddress,
    records: Sequence[ProducerRecord],
    manifest: bytes,
    num_consumers: Sequence[int],
) -> list[Peer]:
    """Publish ``records``; then, in tasks of their own, offer to all who subscribe.

    ``num_consumers``: that read from each of them.
    """
    peers = []
    packed = pack(manifest)
    for record, number in zip(records, num_consumers, strict=True):
        peer = await Peer().open(address)
        if await peer.call(ask.Publish(record, b"")):
            await peer.call(ask.Publish(record, packed))
        peer.offering = asyncio.create_task(_offer(peer, record, number))  # type: ignore[attr-defined]
        peers.append(peer)
    return peers


async def _offer(peer: Peer, record: ProducerRecord, number: int) -> None:
    slots = (SlotRegion(1 << 40, 1 << 26, 0), SlotRegion((1 << 40) + (1 << 26), 1 << 26, 0))
    while number:
        heads = [await peer.announced.get()]
        while not peer.announced.empty():  # whoever has come meanwhile, as a producer does
            heads.append(peer.announced.get_nowait())
        number -= len(heads)
        offers = [
            Offer(
                consumer=ConsumerId(*head["consumer"]),
                consumer_incarnation=head["incarnation"],
                rank=record.rank,
                producer_incarnation=record.incarnation,
                wire_name=record.wire_name,
                metadata=record.metadata,
                slots=slots,
            )
            for head in heads
        ]
        await peer.call(ask.MakeOffers(tuple(map(SealedOffer.seal, offers))))


async def consumers(
    address: RendezvousAddress, subscriptions: Sequence[Subscription], numbers: Mapping[str, int]
) -> list[Peer]:
    """Have each of them attach: it asks for the job, subscribes, waits for its offers, is ready.

    ``numbers``: of the manifest's names.
    """
    sealed: dict[str, SealedSubscription] = {}
    peers = [await Peer().open(address) for _ in subscriptions]

    async def attach(peer: Peer, subscription: Subscription) -> None:
        await peer.call(ask.GetJob())
        known = sealed.get(subscription.plan_digest)
        if known is None:
            known = sealed[subscription.plan_digest] = SealedSubscription.seal(
                subscription, numbers
            )
        head = replace(subscription, tables=())
        await peer.call(ask.Subscribe(SealedSubscription(head, known.tables), None))
        who, whose = subscription.consumer, subscription.incarnation
        await peer.call(ask.GetOffers(who, whose))
        await peer.call(ask.Ready(who, whose))

    await asyncio.gather(*(attach(*each) for each in zip(peers, subscriptions, strict=True)))
    return peers
