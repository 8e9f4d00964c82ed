"""What the ray wire publishes: its ranges, its tensor transport, and whether it can be read."""

import json
from dataclasses import dataclass
from typing import Any

from rdt_transport.errors import WireError
from rdt_transport.wire._regions import RegisteredRange

__all__ = ["RayMetadata"]

_KINDS = ("DRAM", "VRAM")


@dataclass(frozen=True, slots=True)
class RayMetadata:
    """JSON: where its office is follows from the wire's name."""

    transport: str
    serves: bool
    ranges: tuple[RegisteredRange, ...]

    def encode(self) -> bytes:
        ranges = [[each.address, each.num_bytes, each.device, each.memory] for each in self.ranges]
        fields = {"ray": self.transport, "serves": self.serves, "ranges": ranges}
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, peer_name: str, data: bytes) -> "RayMetadata":
        """Raises `WireError`, naming the peer, on anything that is not ours."""
        try:
            fields: dict[str, Any] = json.loads(data)
            ranges = tuple(_range(*each) for each in fields["ranges"])
            return cls(str(fields["ray"]), fields["serves"] is True, ranges)
        except (ValueError, TypeError, KeyError) as error:
            raise WireError(
                f"metadata of {peer_name} is not of the ray wire ({type(error).__name__}); give "
                "the trainer and its workers the same wire="
            ) from error


def _range(address: Any, num_bytes: Any, device: Any, memory: Any) -> RegisteredRange:
    if memory not in _KINDS or any(type(each) is not int for each in (address, num_bytes, device)):
        raise ValueError("a range is three integers and a kind of memory")
    return RegisteredRange(address, num_bytes, device, memory)
