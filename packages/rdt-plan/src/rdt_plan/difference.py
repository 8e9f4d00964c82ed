"""Where two manifests of what should be one model first differ, as a sentence."""

from dataclasses import fields

from rdt_plan.manifest import Manifest, ParamMeta

__all__ = ["first_difference"]


def first_difference(one: Manifest, other: Manifest, who: tuple[str, str]) -> str:
    """What differs first: a name only one has, else the order, else a field; "" when nothing does.

    ``who`` calls the two by name.

    >>> manifests = [Manifest.build([ParamMeta("w", dtype, (4,))]) for dtype in ("int8", "bool")]
    >>> first_difference(*manifests, who=("rank 0", "rank 1"))
    "'w': dtype is 'int8' on rank 0, 'bool' on rank 1"
    """
    held = [{param.name for param in manifest.params} for manifest in (one, other)]
    for here, manifest, there in ((1, one, 0), (0, other, 1)):
        for param in manifest.params:
            if param.name not in held[here]:
                return f"{param.name!r} is declared by {who[there]}, not by {who[here]}"
    for position, (ours, theirs) in enumerate(zip(one.params, other.params, strict=True)):
        if ours.name != theirs.name:
            return f"parameter {position} is {ours.name!r} on {who[0]}, {theirs.name!r} on {who[1]}"
    for ours, theirs in zip(one.params, other.params, strict=True):
        for field in fields(ParamMeta):
            found = getattr(ours, field.name), getattr(theirs, field.name)
            if found[0] != found[1]:
                return (
                    f"{ours.name!r}: {field.name} is {found[0]!r} on {who[0]}, {found[1]!r} on "
                    f"{who[1]}"
                )
    return ""
