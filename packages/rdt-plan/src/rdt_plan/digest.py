"""Digests: how two parties find out that they hold the same manifest or the same plan."""

import hashlib
import json
from typing import Any

__all__ = ["canonical_json", "digest_of", "is_digest"]

_DIGITS = frozenset("0123456789abcdef")


def canonical_json(value: Any) -> bytes:
    """The one JSON spelling of ``value``: ASCII, sorted keys, no white space, no NaN.

    Tuples and lists are spelled alike.

    >>> canonical_json({"b": (1, 2), "a": None})
    b'{"a":null,"b":[1,2]}'
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False
    )
    return text.encode("ascii")


def digest_of(kind: str, value: Any) -> str:
    """SHA-256 (64 hex digits) of ``value`` as JSON; ``kind`` keeps unlike things apart.

    >>> digest_of("a", [1]) == digest_of("b", [1])
    False
    """
    return hashlib.sha256(canonical_json([kind, value])).hexdigest()


def is_digest(text: object) -> bool:
    """Whether ``text`` is spelled as `digest_of` spells a digest.

    >>> is_digest(digest_of("a", [1])), is_digest("0" * 63)
    (True, False)
    """
    return isinstance(text, str) and len(text) == 64 and _DIGITS.issuperset(text)
