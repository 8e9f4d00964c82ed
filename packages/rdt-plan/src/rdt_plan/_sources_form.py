"""A producer's sources, and their JSON form: columns, since a large job has 300,000 of them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, compress, pairwise
from typing import Any, NamedTuple, cast, overload

from rdt_plan._columns import integer_column
from rdt_plan._fields import MAX_INTEGER, array, integer
from rdt_plan.errors import WireFormatError

__all__ = ["SourceRegion", "Sources", "sources_form", "sources_of"]


class SourceRegion(NamedTuple):
    """Where what a producer holds of one name lies in its memory, contiguous, for all its life.

    ``param`` is the name's index in the manifest; the length is that of what the rank holds of it.
    """

    param: int
    address: int
    device: int


_new_region = cast(
    "Callable[[tuple[int, ...]], SourceRegion]", partial(tuple.__new__, SourceRegion)
)


class Sources(Sequence[SourceRegion]):
    """Source regions in the manifest's order, as columns: they are made when they are asked for.

    >>> sources = Sources.of([SourceRegion(2, 4096, 0), SourceRegion(7, 8192, 0)])
    >>> sources.params, sources[-1]
    ((2, 7), SourceRegion(param=7, address=8192, device=0))
    """

    __slots__ = ("addresses", "devices", "params")

    def __init__(
        self, params: Sequence[int], addresses: Sequence[int], devices: Sequence[int]
    ) -> None:
        self.params = params
        self.addresses = addresses
        self.devices = devices

    @classmethod
    def of(cls, regions: Iterable[SourceRegion]) -> "Sources":
        if isinstance(regions, Sources):
            return regions
        return cls(*(tuple(zip(*regions, strict=True)) or ((), (), ())))

    def among(self, params: Collection[int]) -> list[SourceRegion]:
        """Those of ``params``, a set or a mapping, in order.

        >>> Sources((2, 7), (4096, 8192), (0, 0)).among({7})
        [SourceRegion(param=7, address=8192, device=0)]
        """
        rows = zip(self.params, self.addresses, self.devices, strict=True)
        wanted = map(params.__contains__, self.params)
        return list(map(_new_region, compress(rows, wanted)))

    def __len__(self) -> int:
        return len(self.params)

    @overload
    def __getitem__(self, at: int) -> SourceRegion: ...
    @overload
    def __getitem__(self, at: slice) -> "Sources": ...
    def __getitem__(self, at: int | slice) -> "SourceRegion | Sources":
        kind = Sources if isinstance(at, slice) else SourceRegion
        return kind(self.params[at], self.addresses[at], self.devices[at])  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[SourceRegion]:
        return map(_new_region, zip(self.params, self.addresses, self.devices, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Sources.of({list(self)})"


def sources_form(sources: Sequence[SourceRegion]) -> list[list[int]]:
    """Of all params the steps from one to the next, then all addresses, all devices."""
    of = Sources.of(sources)
    steps = [after - before for before, after in pairwise((-1, *of.params))]
    return [steps, list(of.addresses), list(of.devices)]


def sources_of(value: Any) -> Sources:
    columns = array(value, "sources", len(SourceRegion._fields))
    for column, name in zip(columns, SourceRegion._fields, strict=True):
        integer_column(column, f"sources: {name}")
    steps, addresses, devices = columns
    if not len(steps) == len(addresses) == len(devices):
        lengths = [len(column) for column in columns]
        raise WireFormatError(f"sources: expected columns of one length, found {lengths}")
    if 0 in steps:
        raise WireFormatError("sources: expected each parameter once, in the manifest's order")
    params = list(accumulate(steps, initial=-1))[1:]
    if params and params[-1] > MAX_INTEGER:
        integer(params[-1], "sources: param")  # raises
    return Sources(params, addresses, devices)
