"""A whole sync of one producer and two workers (TP=2), against the same bytes in one read each.

Run with `hatch run bench-sync`. Three ways, in the same processes and alternating:

* **sync**: the real `Producer` and `Consumer`s over the nixl wire, from `begin` to the last commit:
  packed chunk by chunk, read, scattered into parameters.
* **baseline**: the same bytes without a protocol: the producer packs all of them into registered
  memory (the kind of memory that rings are made of, on both sides); then each worker fetches its
  own with one prepared read, both at once, and scatters them with the same code.
* **packed before**: the baseline without its packing, a copy less than any sync can do.

`ratio` is median(sync) / median(baseline). `control_microseconds_per_chunk` is what a chunk costs
when it carries next to nothing: the median sync of a model of as many tensors, whose extents and
chunk cap are divided so that as many chunks carry about a thousandth of the bytes, divided by a
worker's chunks (begin and commit are in it, and the pack, read and scatter of a few bytes).
Memory of the same kind as the rings' makes the baseline faster than ordinary tensors would:
`--plain-pages` compares with those.

`messages_beyond_two_a_chunk`: doorbells and messages of the rendezvous, to and from one worker in
one sync, beyond a READY and a DONE a chunk. They are counted in a job of their own.

`transport` is what UCX says in a worker's process that it reads with.
"""

import json
import multiprocessing
import secrets
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.bulk_reads import SECONDS, BulkReads, bulk_buffer
from bench.parallel_model import NUM_WORKERS, Model
from bench.sync_worker import plan_of, serve_worker
from bench.tally import Spent, Stages, Tally, blame
from bench.thread_time import cpu_seconds
from rdt_plan import SyncPlan
from rdt_transport import JobSettings, Producer, ProgressThread, RendezvousClient, host_local
from rdt_transport.doctor.ucx_report import log_transports, read_transport
from rdt_transport.pack import PackList
from rdt_transport.wire.base import Region
from rdt_transport.wire.nixl import NixlWire

TARGET = 1.3
SHRUNK = 32
MESSAGES = 4  # a sync, beside two a chunk: the epoch's record and the commit, asked and answered


class Workers:
    """The workers' processes; they serve one job after another."""

    def __init__(self, undo: ExitStack) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self.pids: list[int] = []
        for _ in range(NUM_WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve_worker, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            undo.callback(process.join, SECONDS)
            undo.callback(ours.send, None)
            self._connections.append(ours)
            self.pids.append(process.pid or 0)

    def post(self, method: str, *arguments: object) -> None:
        """Have each worker run ``method``, all at once."""
        for connection in self._connections:
            connection.send((method, arguments))

    def post_each(self, method: str, arguments: Sequence[tuple[object, ...]]) -> None:
        """Like `post`, with arguments of its own for each."""
        for connection, own in zip(self._connections, arguments, strict=True):
            connection.send((method, own))

    def answers(self) -> list[Any]:
        """What each has answered; raises an answer that is an error."""
        for connection in self._connections:
            if not connection.poll(2 * SECONDS):
                raise TimeoutError(f"a worker has not answered for {2 * SECONDS} s")
        answers = [connection.recv() for connection in self._connections]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def ask(self, method: str, *arguments: object) -> list[Any]:
        self.post(method, *arguments)
        return self.answers()


class Job:
    """A producer here, and the workers."""

    def __init__(
        self,
        undo: ExitStack,
        workers: Workers,
        model: Model,
        settings: JobSettings,
        plain_pages: bool = False,
        counted: bool = False,
    ) -> None:
        self.workers = workers
        self._manifest = model.manifest()
        self._weights = dict(model.weights())
        self._epoch = 0
        host = undo.enter_context(_closing(host_local("bench", secrets.token_hex(8), settings)))
        progress = undo.enter_context(
            _closing(ProgressThread(lambda: NixlWire("producer"), name="progress"))
        )
        self._client = undo.enter_context(
            _closing(
                RendezvousClient(
                    host.address, on_event=lambda event: self._producer.on_event(event)
                )
            )
        )
        self._producer = undo.enter_context(
            _closing(
                Producer(progress, self._client, rank=0, manifest=self._manifest, settings=settings)
            )
        )
        self._producer.open(SECONDS)
        self._bulk = BulkReads(progress)
        undo.callback(workers.ask, "close")
        each = range(NUM_WORKERS)
        own = (settings, counted)
        workers.post_each("open", [(host.address, model, worker, *own) for worker in each])
        workers.answers()
        self._packs: list[PackList] = []
        packed = [self._buffer(plan_of(model, worker, settings), plain_pages) for worker in each]
        self._pack()
        progress.call(lambda wire: wire.register(packed), SECONDS)
        peer = progress.call(lambda wire: wire.address(), SECONDS)
        regions = [Region(buffer.data_ptr(), buffer.numel()) for buffer in packed]
        with self._bulk.busy():
            workers.post_each(
                "prepare_baseline", [(peer, region, plain_pages) for region in regions]
            )
            workers.answers()

    def _buffer(self, plan: SyncPlan, plain_pages: bool) -> torch.Tensor:
        """Room for all bytes of a worker, and the packs that fill it."""
        buffer = bulk_buffer(plan.bytes_pulled, plain_pages)
        start = 0
        for chunk in plan.chunks:
            part = buffer[start : start + chunk.serve.num_bytes]
            self._packs.append(PackList(chunk.serve, part))
            start += chunk.serve.num_bytes
        return buffer

    def _pack(self) -> None:
        for pack in self._packs:
            pack.run(self._weights)

    def sync(self) -> list[Stages]:
        """One epoch; the workers' stages."""
        self._epoch += 1
        self._producer.begin(self._client.begin(0, self._epoch, SECONDS))
        self.workers.post("sync", self._epoch)
        for group in self._producer.groups:
            self._producer.wait_for_credit(SECONDS)
            names = self._manifest.groups[group].names
            self._producer.publish(group, {n: self._weights[n] for n in names}, SECONDS)
        self._producer.finish(SECONDS)
        return self.workers.answers()

    def baseline(self) -> list[Stages]:
        """Pack everything, then both workers' reads at once; the workers' stages."""
        self._pack()
        return self.packed_before()

    def packed_before(self) -> list[Stages]:
        """Both workers' reads at once; the workers' stages."""
        with self._bulk.busy():
            return self.workers.ask("baseline")

    def spent(self) -> Spent:
        workers = self.workers.ask("cpu_seconds")
        return {"producer": cpu_seconds()} | {
            f"worker {number}": spent for number, spent in enumerate(workers)
        }

    def check(self) -> int:
        """Sync into cleared parameters and compare them; the bytes compared."""
        self.workers.ask("clear")
        self.sync()
        answers = self.workers.ask("num_wrong")
        for worker, (wrong, _) in enumerate(answers):
            if wrong:
                raise SystemExit(f"worker {worker}: {wrong} elements differ from the source's")
        return sum(2 * compared for _, compared in answers)


@contextmanager
def _closing(thing: Any) -> Generator[Any]:
    try:
        yield thing
    finally:
        thing.close()


def run(
    megabytes: Annotated[int, typer.Option(help="of the model")] = 1000,
    rounds: Annotated[int, typer.Option(help="of each way, in both orders")] = 6,
    slots: Annotated[int, typer.Option(help="of every ring")] = JobSettings(1).num_slots,
    chunk_megabytes: Annotated[float, typer.Option(help="cap of a chunk, MiB")] = (
        JobSettings(1).chunk_bytes / (1 << 20)
    ),
    lookahead: Annotated[int, typer.Option()] = JobSettings(1).lookahead,
    plain_pages: Annotated[
        bool, typer.Option("--plain-pages", help="ordinary tensors for the baseline's buffers")
    ] = False,
) -> None:
    """Whole syncs of one producer and two workers against one read each; a table, a JSON line."""
    torch.set_num_threads(1)  # three busy processes share two cores
    settings = JobSettings(
        1, num_slots=slots, max_chunk_bytes=int(chunk_megabytes * (1 << 20)), lookahead=lookahead
    )
    model = Model.of(megabytes * 10**6)
    with tempfile.TemporaryDirectory() as folder:
        log_transports(Path(folder))
        with ExitStack() as undo:
            workers = Workers(undo)
            with ExitStack() as closing:
                job = Job(closing, workers, model, settings, plain_pages)
                compared = job.check()
                job.baseline()
                num_chunks = max(workers.ask("num_chunks"))
                ways = [
                    Tally(way, job.spent) for way in (job.sync, job.baseline, job.packed_before)
                ]
                sync, baseline, packed_before = ways
                for number in range(rounds):
                    for tally in ways if number % 2 else reversed(ways):
                        tally.round()
            tiny = replace(settings, max_chunk_bytes=settings.chunk_bytes // SHRUNK**2)
            with ExitStack() as closing:
                job = Job(closing, workers, model.shrunk(SHRUNK), tiny)
                job.sync()
                tiny_chunks = max(workers.ask("num_chunks"))
                control = Tally(job.sync, job.spent)
                for _ in range(10 * rounds):
                    control.round()
            with ExitStack() as closing:
                job = Job(closing, workers, model.shrunk(SHRUNK), tiny, counted=True)
                job.sync()
                before = workers.ask("num_messages")
                job.sync()
                after = workers.ask("num_messages")
            messages = max(b - a for a, b in zip(before, after, strict=True))
        transport = read_transport(Path(folder), workers.pids[0])  # written out when it ended
    comparable = transport == "cma"
    ratio = round(sync.median / baseline.median, 3)
    Console().print(blame({"sync": sync, "baseline": baseline, "tiny sync": control}))
    table = Table("what", "value")
    table.add_row("parameters compared bit for bit", f"{compared:,} bytes, all equal")
    table.add_row("chunks of a worker", f"{num_chunks} (tiny: {tiny_chunks})")
    table.add_row("sync, each round", " ".join(f"{s:.3f}" for s in sync.seconds))
    table.add_row("baseline, each round", " ".join(f"{s:.3f}" for s in baseline.seconds))
    table.add_row("packed before, each round", " ".join(f"{s:.3f}" for s in packed_before.seconds))
    verdict = ("met" if ratio <= TARGET else "missed") if comparable else "not comparable"
    table.add_row("sync / baseline", f"{ratio} (target: at most {TARGET}, {verdict})")
    table.add_row("sync / packed before", f"{sync.median / packed_before.median:.3f}")
    busy = sync.busy_seconds / baseline.busy_seconds
    table.add_row("CPU seconds of sync / of baseline", f"{busy:.3f}")
    table.add_row(
        "messages of a worker's tiny sync",
        f"{messages} (bound: 2 a chunk and {MESSAGES}: {2 * tiny_chunks + MESSAGES})",
    )
    table.add_row("reads are carried by", transport)
    Console().print(table)
    line = {
        "bench": "sync",
        "ratio": ratio,
        "messages_beyond_two_a_chunk": messages - 2 * tiny_chunks,
        "control_microseconds_per_chunk": round(1e6 * control.median / tiny_chunks, 1),
        "transport": transport if comparable else f"{transport} (not comparable)",
    }
    print(json.dumps(line))


if __name__ == "__main__":
    typer.run(run)
