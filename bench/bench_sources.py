"""What serving sharded parameters costs each trainer rank: memory, and bytes that leave it.

Run with `hatch run bench-sources`. Four FSDP2 ranks (gloo) and two workers, over NIXL, on CPU; the
rows of each parameter are cut unevenly. Measured on each rank but the first, which also holds the
workers: the most memory that was resident, from before its trainer was made until it had synced
several times, beyond what it had before; a small job has run in the process by then, so that
libraries and their pools are in that. That is the *total*; parts of it are the slots that workers
read from (a ring for the workers of one plan) and, where masters are cast, the area that they are
cast into. What is left over is the source's *own*, and what each job takes whatever it serves: the
agent's shared memory, threads, plans.

* **gather** (`ModuleSource`), own, in gather groups: at most lookahead + 1, and twice the tensor
  that torch is putting together.
* **shards** (`ShardedModuleSource`), in chunks: own at most two, and in total at most two.

Each way of shards is measured with chunks of half the size, too. By how many chunks the total
*grows* from there is what it has of chunks; the rest does not depend on their size, and is fewer
of larger ones.

`bytes_ratio` is what workers read from a rank in one sync, by shards, over what they need of what
it holds; the worst rank's.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.source_rank import Found, Sizes, Way, rank_of
from rdt_trainer import JobSettings
from rdt_trainer.testing.rank_processes import RankProcesses

NUM_RANKS = 4
WAYS = [
    Way("gather", is_master=False, direct=True),
    Way("gather", is_master=True, direct=True),
    Way("shards", is_master=False, direct=True),
    Way("shards", is_master=False, direct=False),
    Way("shards", is_master=True, direct=True),
    Way("shards", is_master=True, direct=False),
    Way("shards", is_master=True, direct=False, stable=False),
]
MIB = 1 << 20


def worst(found: Sequence[Found], measure: Callable[[Found], float]) -> float:
    """The largest of the ranks that hold no workers."""
    return max(map(measure, found[1:]))


def own(found: Found) -> int:
    """What neither slots nor a staging area are."""
    return found.extra - found.rings - found.staged


def run(
    layers: Annotated[int, typer.Option()] = 6,
    tensors: Annotated[int, typer.Option(help="of a layer")] = 12,
    megabytes: Annotated[float, typer.Option(help="of a tensor")] = 4.0,
    chunk_megabytes: Annotated[float, typer.Option(help="cap of a chunk, MiB")] = 8.0,
    syncs: Annotated[int, typer.Option(help="in which the peak is looked for")] = 3,
) -> None:
    """Memory and bytes of each way to serve shards; a table, a JSON line."""
    # Blocks that are freed go back to the system at once, or what is resident says little.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 << 10)
    cap = int(chunk_megabytes * MIB)
    columns = 1024
    sizes = Sizes(layers, tensors, int(megabytes * MIB) // (2 * columns) + 2, columns)
    measured: dict[Way, list[Found]] = {}
    grown: dict[Way, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        RankProcesses(rank_of, NUM_RANKS, Path(folder) / "store", NUM_RANKS) as ranks,
    ):

        def measure(way: Way, each: Sizes, chunk_bytes: int) -> list[Found]:
            settings = JobSettings(NUM_RANKS, max_chunk_bytes=chunk_bytes)
            return ranks.ask("measure", way, each, settings, syncs)

        for way in WAYS:
            if way.source not in {each.source for each in measured}:
                measure(way, Sizes(1, 1, 64, 64), cap)
            measured[way] = measure(way, sizes, cap)
            if way.source == "shards":
                halves = measure(way, sizes, cap // 2)
                more = [a.extra - b.extra for a, b in zip(measured[way], halves, strict=True)]
                grown[way] = max(more[1:]) / (cap - cap // 2)
    table = Table(
        "way",
        "total, MiB",
        "slots",
        "area",
        "own",
        "in groups",
        "in chunks",
        "total",
        "grows",
        "bytes",
    )
    groups, chunks, totals, ratios = {}, {}, {}, {}
    for way, found in measured.items():
        groups[way] = worst(found, lambda each: own(each) / sizes.group_bytes)
        chunks[way] = worst(found, lambda each: own(each) / cap)
        totals[way] = worst(found, lambda each: each.extra / cap)
        ratios[way] = max(each.left / each.needed for each in found)
        by_shards = way.source == "shards"
        table.add_row(
            str(way),
            *(
                f"{worst(found, measure) / MIB:.1f}"
                for measure in (lambda e: e.extra, lambda e: e.rings, lambda e: e.staged, own)
            ),
            f"{groups[way]:.2f}",
            f"{chunks[way]:.2f}",
            f"{totals[way]:.2f}",
            f"{grown[way]:.2f}" if by_shards else "",
            f"{ratios[way]:.3f}" if by_shards else "",
        )
    Console().print(table)
    gather = [way for way in WAYS if way.source == "gather"]
    shards = [way for way in WAYS if way.source == "shards"]
    plain = [way for way in shards if not way.is_master]
    masters = [way for way in shards if way.is_master]
    line = {
        "bench": "sources",
        "gather_groups": round(max(groups[way] for way in gather), 3),
        "groups_allowed": round(JobSettings(NUM_RANKS).lookahead + 1 + 2 / tensors, 3),
        "shards_chunks": round(max(chunks[way] for way in shards if way.stable), 3),
        "shards_direct_total_chunks": round(min(totals[way] for way in plain), 3),
        "shards_total_chunks": round(max(totals[way] for way in plain), 3),
        "shards_grow_chunks": round(max(grown[way] for way in plain), 3),
        "masters_total_chunks": round(min(totals[way] for way in masters), 3),
        "bytes_ratio": round(max(ratios[way] for way in shards), 4),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    typer.run(run)
