"""The wire format: what crosses between packages and processes, as bytes.

A message is compact JSON: ``{"body": ..., "kind": ..., "v": 4}``. Decoding is strict: another
version, an unknown kind, a missing or foreign key, a value of the wrong type or sign raises
`WireFormatError`. What only a manifest can tell (bounds, owners, groups) is `check_table`'s.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rdt_plan._decoding import manifest_of, names_of, plan_of
from rdt_plan._encoding import consumer_form, manifest_form, plan_form
from rdt_plan._fields import fields
from rdt_plan._table_form import table_form, table_of
from rdt_plan.collector import collector_paused
from rdt_plan.digest import canonical_json
from rdt_plan.errors import WireFormatError
from rdt_plan.identity import ConsumerId
from rdt_plan.manifest import Manifest
from rdt_plan.plan import SyncPlan
from rdt_plan.table import ChunkTable, check_table

__all__ = [
    "MAX_MESSAGE_BYTES",
    "WIRE_VERSION",
    "check_table",
    "decode_manifest",
    "decode_message",
    "decode_plan",
    "decode_table",
    "encode_manifest",
    "encode_message",
    "encode_plan",
    "encode_table",
    "manifest_names",
]

WIRE_VERSION = 4

MAX_MESSAGE_BYTES = 128 << 20
"""Larger messages are refused unread; a plan over 150,000 names takes about a third of it."""

_KEYS = frozenset({"body", "kind", "v"})


def encode_message(kind: str, body: Any) -> bytes:
    """The bytes of a message; raises `WireFormatError` above `MAX_MESSAGE_BYTES`.

    >>> encode_message("greeting", {"to": "all"})
    b'{"body":{"to":"all"},"kind":"greeting","v":4}'
    """
    data = canonical_json({"v": WIRE_VERSION, "kind": kind, "body": body})
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireFormatError(
            f"a {kind} message of {len(data)} bytes: expected at most {MAX_MESSAGE_BYTES}; "
            f"split the model over more workers or raise the cap on a chunk"
        )
    return data


def decode_message(data: bytes, kind: str) -> Any:
    """The body of a message of ``kind``.

    Raises:
        WireFormatError: too large, no JSON, another wire version, another kind.

    >>> decode_message(b'{"body":1,"kind":"greeting","v":1}', "greeting")
    Traceback (most recent call last):
    rdt_plan.errors.WireFormatError: a greeting message of wire version 1: expected version 4; \
upgrade the older side
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireFormatError(
            f"a {kind} message of {len(data)} bytes: expected at most {MAX_MESSAGE_BYTES}"
        )
    try:
        message = json.loads(data, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireFormatError(f"a {kind} message that is no JSON: {error}") from error
    if isinstance(message, dict) and "v" in message and message["v"] != WIRE_VERSION:
        raise WireFormatError(
            f"a {kind} message of wire version {message['v']!r}: expected version "
            f"{WIRE_VERSION}; upgrade the older side"
        )
    message = fields(message, "message", _KEYS)
    if type(message["v"]) is not int or message["kind"] != kind:
        raise WireFormatError(f"expected a {kind} message, found kind {message['kind']!r}")
    return message["body"]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise WireFormatError(f"expected each key once, found {[key for key, _ in pairs]}")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise WireFormatError(f"expected finite numbers, found {text}")


def encode_manifest(manifest: Manifest) -> bytes:
    """Raises `WireFormatError` above `MAX_MESSAGE_BYTES`; so do its siblings."""
    return encode_message("manifest", manifest_form(manifest))


def decode_manifest(data: bytes) -> Manifest:
    """Raises `WireFormatError` for anything malformed; so do its siblings."""
    return manifest_of(decode_message(data, "manifest"))


@collector_paused()
def manifest_names(data: bytes) -> tuple[str, ...]:
    """Names of an encoded manifest, in order; for whoever has decoded all of it before."""
    return names_of(decode_message(data, "manifest"))


def encode_table(table: ChunkTable, numbers: Mapping[str, int] | None = None) -> bytes:
    """``numbers``: of the manifest's names (`Manifest.numbers`); None spells names out."""
    return encode_message("chunk_table", table_form(table, numbers))


def decode_table(data: bytes, consumer: ConsumerId, names: Sequence[str] = ()) -> ChunkTable:
    """The table of ``consumer``, whom it does not name: equal workers of two replicas send one.

    ``names``: the manifest's, in order; none: only tables that spell names out can be read.
    """
    return table_of(decode_message(data, "chunk_table"), consumer, names)


def encode_plan(plan: SyncPlan) -> bytes:
    body = {"consumer": consumer_form(plan.consumer), **plan_form(plan)}
    return encode_message("sync_plan", body)


def decode_plan(data: bytes) -> SyncPlan:
    return plan_of(decode_message(data, "sync_plan"))
