"""Train a tiny model, serve it with a real vLLM, and keep the server exact, sync by sync.

    hatch run demo [--model qwen3|llama] [--tp 1|2] [--syncs N] [--json FILE]

Trainer and server are two Ray actors of one local cluster; Ray places them and hosts the
rendezvous, and the weights go from the trainer's memory into vLLM's workers by NIXL reads.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from logging import ERROR
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from examples.demo.report import DemoReport, Sync

PROMPT = (7, 8, 9, 10, 11, 12)
NUM_TOKENS = 6
STEPS_PER_SYNC = 3
TABLE_CHARS = 126  # what the table needs, on a narrower terminal as well
FLIPPED = "model.norm.weight"  # the parameter in which one byte is changed, to see the check fail

console = Console()


class Model(StrEnum):
    """Tiny models the demo can train and serve."""

    QWEN3 = "qwen3"
    LLAMA = "llama"


@contextmanager
def actors(model: Model, tp: int, folder: Path) -> Iterator[tuple[Any, Any]]:
    """A trainer and a server in a local Ray cluster; everything is gone afterwards."""
    import ray

    from examples.demo.server import DemoServer
    from examples.demo.trainer import DemoTrainer

    with console.status("starting Ray"):
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=ERROR)
    try:
        with console.status("building the model"):
            trainer: Any = ray.remote(num_cpus=0)(DemoTrainer).remote(model.value)
            config = str(folder / "initial")
            model_bytes = ray.get(trainer.save.remote(config))
        console.print(f"trainer: {model.value}, {model_bytes:,} bytes of weights")
        with console.status(f"starting vLLM over {tp} worker(s), about half a minute"):
            server: Any = ray.remote(num_cpus=0)(DemoServer).remote(config, tp)
            ray.get(server.generate.remote(PROMPT, 1))
        try:
            with console.status("recording the loaders and connecting"):
                ray.get(trainer.connect.remote(server))
            console.print("vLLM runs, its workers are attached")
            yield trainer, server
        finally:
            ray.get(trainer.close.remote())
            ray.get(server.stop.remote())
    finally:
        ray.shutdown()


def one_sync(trainer: Any, server: Any, epoch: int, folder: Path) -> Sync:
    """Train, sync, and prove every worker exact."""
    import ray

    with console.status(f"epoch {epoch}: training"):
        loss = ray.get(trainer.train.remote(STEPS_PER_SYNC))
    with console.status(f"epoch {epoch}: syncing"):
        ray.get(server.observe.remote())
        stages = ray.get(trainer.sync.remote())
    with console.status(f"epoch {epoch}: comparing with a fresh model"):
        checkpoint = str(folder / f"epoch{epoch}")
        ray.get(trainer.save.remote(checkpoint))
        report = ray.get(server.check.remote(checkpoint, PROMPT))
        tokens = ray.get(server.generate.remote(PROMPT, NUM_TOKENS))
        traffic = ray.get(server.traffic.remote())
    console.print(
        f"epoch {epoch}: loss {loss:.2f}, {stages['total']:.0f} ms, "
        f"{'exact' if report.ok else report}, tokens {' '.join(map(str, tokens))}"
    )
    return Sync(
        epoch=epoch,
        exact=report.ok,
        bytes_compared=[worker.bytes_compared for worker in report.workers],
        bytes_pulled=[worker["bytes_pulled"] for worker in traffic],
        bytes_landed=[worker["bytes_landed"] for worker in traffic],
        stage_milliseconds=stages,
        token_ids=list(tokens),
    )


def main(
    model: Annotated[Model, typer.Option(help="architecture to train and serve")] = Model.QWEN3,
    tp: Annotated[int, typer.Option(min=1, max=2, help="workers of vLLM")] = 2,
    syncs: Annotated[int, typer.Option(min=1, help="how often to sync")] = 4,
    json: Annotated[Path | None, typer.Option(help="write the results there")] = None,
) -> None:
    """Watch a real vLLM follow a model in training, exactly."""
    import ray

    with tempfile.TemporaryDirectory(prefix="rdt-demo-") as name:
        folder = Path(name)
        with actors(model, tp, folder) as (trainer, server):
            before = ray.get(server.generate.remote(PROMPT, NUM_TOKENS))
            console.print(f"tokens before the first sync: {' '.join(map(str, before))}")
            done = [one_sync(trainer, server, epoch, folder) for epoch in range(1, syncs + 1)]
            flipped = ray.get(server.check.remote(str(folder / f"epoch{syncs}"), PROMPT, FLIPPED))
            model_bytes = ray.get(trainer.save.remote(str(folder / "last")))
    report = DemoReport(model.value, tp, done, model_bytes)
    Console(width=max(console.width, TABLE_CHARS)).print(report.table())
    console.print(f"one byte of {FLIPPED} flipped: the check {'passes' if flipped.ok else 'fails'}")
    if json is not None:
        report.write(json)
    if flipped.ok or not all(sync.exact for sync in done):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
