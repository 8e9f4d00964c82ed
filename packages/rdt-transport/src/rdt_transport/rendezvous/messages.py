"""JSON forms of requests, answers and events: one object a message, its class named by ``kind``.

Every field is checked against its annotation when it is read, so what reaches the state machine is
typed. Nothing is ever unpickled.
"""

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from rdt_plan import ConsumerId, RdtPlanError
from rdt_plan.records import EpochRecord, JobRecord, ProducerRecord
from rdt_transport.errors import RendezvousProtocolError
from rdt_transport.rendezvous.events import Announced, PushedEvent
from rdt_transport.rendezvous.outcome import DroppedReplica, EpochOutcome
from rdt_transport.rendezvous.packing import pack, unpack
from rdt_transport.rendezvous.protocol import COMPACT
from rdt_transport.rendezvous.requests import Request
from rdt_transport.rendezvous.sealed import (
    SealedOffer,
    SealedSubscription,
    offers_form,
    offers_of,
)

__all__ = [
    "AnnouncementWriter",
    "decode_answer",
    "decode_event",
    "decode_request",
    "encode_answer",
    "encode_message",
]

JsonObject = dict[str, Any]


def _exactly(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:  # bool is no int here
            raise RendezvousProtocolError(f"expected {kind.__name__}, found {value!r:.80}")
        return value

    return check


def _write_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _read_bytes(value: Any) -> bytes:
    try:
        return binascii.a2b_base64(_exactly(str)(value), strict_mode=True)
    except ValueError as error:
        raise RendezvousProtocolError(f"malformed base64: {error}") from error


def _read_consumer(value: Any) -> ConsumerId:
    if type(value) is not list or len(value) != 2:
        raise RendezvousProtocolError(f"expected [replica, worker], found {value!r:.80}")
    replica, worker = map(_exactly(int), value)
    if replica < 0 or worker < 0:
        raise RendezvousProtocolError(f"replica and worker count from 0, found {value!r}")
    return ConsumerId(replica, worker)


_Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # write, read
_CODECS: dict[Any, _Codec] = {
    NoneType: (lambda value: None, lambda value: None),
    bool: (_exactly(bool), _exactly(bool)),
    int: (_exactly(int), _exactly(int)),
    str: (_exactly(str), _exactly(str)),
    bytes: (_write_bytes, _read_bytes),
    ConsumerId: (lambda value: [value.replica, value.worker], _read_consumer),
}


def _record_codec(record: Any) -> _Codec:
    def read(value: Any) -> Any:
        try:
            return record.from_json(_exactly(dict)(value))
        except RdtPlanError as error:
            raise RendezvousProtocolError(f"malformed {record.__name__}: {error}") from error

    return (lambda value: value.to_json(), read)


def _tuple_codec(item: Any) -> _Codec:
    write, read = _CODECS[item]
    return (
        lambda value: [write(one) for one in value],
        lambda value: tuple(read(one) for one in _exactly(list)(value)),
    )


def _optional_codec(item: Any) -> _Codec:
    write, read = _CODECS[item]
    return (
        lambda value: None if value is None else write(value),
        lambda value: None if value is None else read(value),
    )


def _packed_codec(record: Any) -> _Codec:
    """A record that is large and sent to many: its JSON packed, in base64."""
    write, read = _record_codec(record)

    def read_packed(value: Any) -> Any:
        try:
            form = json.loads(unpack(_read_bytes(value)))
        except (ValueError, RecursionError, RendezvousProtocolError) as error:
            raise RendezvousProtocolError(f"malformed {record.__name__}: {error}") from error
        return read(form)

    return (lambda value: _write_bytes(pack(COMPACT.encode(write(value)).encode())), read_packed)


for _record in (EpochRecord, ProducerRecord, SealedSubscription):
    _CODECS[_record] = _record_codec(_record)
_CODECS[JobRecord] = _packed_codec(JobRecord)
_CODECS[tuple[SealedOffer, ...]] = (offers_form, offers_of)
for _item in (ConsumerId, int):
    _CODECS[tuple[_item, ...]] = _tuple_codec(_item)
for _item in (int, str, JobRecord, SealedSubscription):
    _CODECS[_item | None] = _optional_codec(_item)


def _shape(message: Any) -> dict[str, _Codec]:
    hints = get_type_hints(message)
    return {field.name: _CODECS[hints[field.name]] for field in fields(message)}


def _write_fields(value: Any, shape: dict[str, _Codec]) -> JsonObject:
    return {name: write(getattr(value, name)) for name, (write, _) in shape.items()}


def _read_fields(given: JsonObject, kind: Any, shape: dict[str, _Codec], what: str) -> Any:
    if given.keys() != shape.keys():
        raise RendezvousProtocolError(f"{what} has the fields {sorted(shape)}, not {sorted(given)}")
    return kind(**{field: read(given[field]) for field, (_, read) in shape.items()})


def _fields_codec(kind: Any) -> _Codec:
    shape = _shape(kind)
    return (
        lambda value: _write_fields(value, shape),
        lambda value: _read_fields(_exactly(dict)(value), kind, shape, kind.__name__),
    )


_CODECS[DroppedReplica] = _fields_codec(DroppedReplica)
_CODECS[tuple[DroppedReplica, ...]] = _tuple_codec(DroppedReplica)
_CODECS[EpochOutcome] = _fields_codec(EpochOutcome)


_REQUESTS = {kind.__name__: kind for kind in get_args(Request)}
_EVENTS = {kind.__name__: kind for kind in get_args(PushedEvent)}
_SHAPES = {kind: _shape(kind) for kind in (*_REQUESTS.values(), *_EVENTS.values())}


def encode_message(message: Request | PushedEvent) -> JsonObject:
    """The JSON object of a request or an event."""
    kind = type(message)
    return {"kind": kind.__name__, **_write_fields(message, _SHAPES[kind])}


class AnnouncementWriter:
    """Writes the JSON of `Announced` events: what is equal in those of one consumer, once."""

    def __init__(self) -> None:
        self._head: Any = None
        self._text = ""

    def __call__(self, event: Announced) -> str:
        """As `encode_message` gives it, as text."""
        sealed = event.subscription
        if sealed.head is not self._head:
            self._head, self._text = sealed.head, COMPACT.encode(sealed.head.to_json())
        subscription = f'{self._text[:-1]},"tables":{COMPACT.encode(sealed.rows())}}}'
        return f'{{"kind":"{Announced.__name__}","subscription":{subscription}}}'


def _decode(value: Any, kinds: dict[str, Any], what: str) -> Any:
    given = dict(_exactly(dict)(value))
    name = given.pop("kind", None)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise RendezvousProtocolError(f"unknown {what} {name!r:.80}")
    return _read_fields(given, kind, _SHAPES[kind], f"{what} {name}")


def decode_request(value: Any) -> Request:
    """The request in a JSON value; raises `RendezvousProtocolError` for anything else."""
    return _decode(value, _REQUESTS, "request")


def decode_event(value: Any) -> PushedEvent:
    """The event in a JSON value; raises `RendezvousProtocolError` for anything else."""
    return _decode(value, _EVENTS, "event")


def encode_answer(request: Request, answer: Any) -> Any:
    """The JSON value of ``request``'s answer."""
    return _CODECS[type(request).answer][0](answer)


def decode_answer(request: Request, value: Any) -> Any:
    """The answer to ``request`` in a JSON value; raises `RendezvousProtocolError`."""
    return _CODECS[type(request).answer][1](value)
