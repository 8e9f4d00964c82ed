"""Element sizes, by torch's dtype names without the ``torch.`` prefix."""

from rdt_plan.errors import ManifestError

__all__ = ["ITEM_BYTES", "item_bytes"]

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "complex32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


def item_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``; raises `ManifestError` for a name that is no dtype."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise ManifestError(
            f"unknown dtype {dtype!r}: expected a torch dtype's name without 'torch.', "
            f"one of {', '.join(sorted(ITEM_BYTES))}"
        ) from None
