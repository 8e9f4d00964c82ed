"""What was measured with one model, as tables to read."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from bench.gpu.measured import Result
from bench.stages import STAGES, UNATTRIBUTED

__all__ = ["tables"]

PEER = "vllm sharded_rdt"


def tables(
    kind: str, num_bytes: int, limits: Mapping[str, float], results: Mapping[str, Result]
) -> Iterator[Table]:
    """How long each path took, and, where that was recorded, with what.

    ``limits``: seconds of moving ``num_bytes`` as the hardware can.
    """
    yield _times(f"{kind}: {num_bytes} bytes a sync", num_bytes / 1e9, limits, results)
    if traced := {name: each for name, each in results.items() if each.blame}:
        yield _stages(f"{kind}: where one warm sync's time went, ms", traced)


def _times(
    title: str, gigabytes: float, limits: Mapping[str, float], results: Mapping[str, Result]
) -> Table:
    peer = results.get(PEER)
    times = Table(
        "path", "first, ms", "median, ms", "GB/s", "x sharded_rdt", "target", "differ",
        title=title,
    )  # fmt: skip
    for name, seconds in limits.items():
        times.add_row(name, "", f"{seconds * 1e3:.2f}", f"{gigabytes / seconds:.0f}", "", "", "")
    for name, result in results.items():
        if not result.is_whole:
            times.add_row(name, "", "failed", "", "", "", "")
            continue
        ratio = peer.median / result.median if peer and peer.is_whole else 0.0
        met = "" if not (result.target and ratio) else _verdict(result, ratio)
        times.add_row(
            name,
            f"{result.seconds[0] * 1e3:.1f}",
            f"{result.median * 1e3:.2f}",
            f"{gigabytes / result.median:.0f}",
            f"{ratio:.1f}" if ratio else "",
            f"{result.target:.0f} {met}" if result.target else "",
            "" if result.wrong is None else f"{result.wrong[0]} of {result.wrong[1]}",
        )
    return times


def _verdict(result: Result, ratio: float) -> str:
    if not result.is_exact:
        return "void"  # how fast wrong weights are there says nothing
    return "met" if ratio >= result.target else "missed"


def _stages(title: str, traced: Mapping[str, Result]) -> Table:
    where = Table("stage", title=title)
    for name in traced:
        where.add_column(f"{name}: busy")
        where.add_column(f"{name}: blame")
    for stage in (*STAGES, UNATTRIBUTED):
        cells = []
        for each in traced.values():
            cells += [f"{found.get(stage, 0.0) * 1e3:.2f}" for found in (each.busy, each.blame)]
        where.add_row(stage, *cells)
    return where
