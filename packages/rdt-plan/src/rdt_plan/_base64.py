"""Bytes in JSON: base64, in the one canonical spelling."""

from base64 import b64decode, b64encode
from typing import Any

from rdt_plan._fields import string
from rdt_plan.errors import WireFormatError

__all__ = ["base64_of", "bytes_of"]


def base64_of(value: bytes) -> str:
    return b64encode(value).decode("ascii")


def bytes_of(value: Any, where: str, max_bytes: int) -> bytes:
    if len(string(value, where)) > -(-max_bytes // 3) * 4:
        raise WireFormatError(f"{where}: expected at most {max_bytes} bytes as base64")
    try:
        decoded = b64decode(value, validate=True)
    except ValueError as error:
        raise WireFormatError(f"{where}: expected base64: {error}") from error
    if base64_of(decoded) != value:  # stray bits in the last digit
        raise WireFormatError(f"{where}: expected canonical base64")
    return decoded
