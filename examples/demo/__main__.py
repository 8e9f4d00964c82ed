"""Train a tiny model, serve it with a real vLLM, and keep the server exact, sync by sync.

    hatch run demo [--model qwen3|llama|qwen3-moe] [--tp 1|2] [--syncs N] [--json FILE] [--doctor]

Trainer and server are two Ray actors of one local cluster; Ray places them and hosts the
rendezvous, and the weights go from the trainer's memory into vLLM's workers by NIXL reads.
"""

import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
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
FLIPPED = "model.norm.weight"  # the parameter in which one byte is changed, to see the check fail
TABLE_CHARS = 140  # what the table needs, on a narrower terminal as well
ANSWER_SECONDS = 120.0
START_SECONDS = 240.0  # vLLM imports for half a minute where nothing is in the page cache

console = Console()


class Model(StrEnum):
    """Tiny models the demo can train and serve."""

    QWEN3 = "qwen3"
    LLAMA = "llama"
    QWEN3_MOE = "qwen3-moe"


def answer(reference: Any, doing: str, seconds: float = ANSWER_SECONDS) -> Any:
    """What an actor answers, shown as ``doing`` meanwhile; an error names it after the deadline."""
    import ray
    from ray.exceptions import GetTimeoutError

    with console.status(doing):
        try:
            return ray.get(reference, timeout=seconds)
        except GetTimeoutError as error:
            raise TimeoutError(f"{doing}: no answer within {seconds:g} s") from error


@contextmanager
def actors(model: Model, tp: int, folder: Path) -> Generator[tuple[Any, Any, int]]:
    """A trainer and a server in a local Ray cluster, and the bytes of the model's weights.

    Whatever happens, every process is gone afterwards.
    """
    import ray

    from examples.demo.trainer import DemoTrainer
    from rdt_vllm.testing.engine_actor import EngineActor

    with ExitStack() as undo:
        with console.status("starting Ray"):
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=ERROR)
        undo.callback(ray.shutdown)
        trainer: Any = ray.remote(num_cpus=0)(DemoTrainer).remote(model.value)
        initial = str(folder / "initial")
        num_bytes = answer(trainer.save.remote(initial), "building the model")
        console.print(f"trainer: {model.value}, {num_bytes:,} bytes of weights")
        # Random weights until the first sync.
        server: Any = ray.remote(num_cpus=0)(EngineActor).remote(initial, tp, load_format="dummy")
        undo.callback(lambda: answer(server.stop.remote(), "stopping vLLM"))
        before = answer(
            server.generate.remote(PROMPT, NUM_TOKENS),
            f"starting vLLM over {tp} worker(s), about half a minute",
            START_SECONDS,
        )
        undo.callback(lambda: answer(trainer.close.remote(), "detaching"))
        answer(trainer.connect.remote(server), "recording the loaders and connecting")
        console.print(f"vLLM runs, its workers are attached; tokens {' '.join(map(str, before))}")
        yield trainer, server, num_bytes


def one_sync(trainer: Any, server: Any, epoch: int, folder: Path) -> Sync:
    """Train, sync, and prove every worker exact."""
    where = f"epoch {epoch}:"
    loss = answer(trainer.train.remote(STEPS_PER_SYNC), f"{where} training")
    answer(server.observe.remote(), f"{where} watching")
    stages = answer(trainer.sync.remote(), f"{where} syncing")
    checkpoint = str(folder / f"epoch{epoch}")
    answer(trainer.save.remote(checkpoint), f"{where} writing down what was sent")
    report = answer(
        server.check.remote(checkpoint, PROMPT), f"{where} comparing with a fresh model"
    )
    tokens = answer(server.generate.remote(PROMPT, NUM_TOKENS), f"{where} generating")
    traffic = answer(server.traffic.remote(), f"{where} counting bytes")
    for stage in ("read", "scatter"):  # the slowest worker's
        seconds = (worker["stage_seconds"][stage] for worker in traffic)
        stages[stage] = max(seconds) * 1e3
    stages["total"] = stages.pop("total")  # last
    console.print(
        f"{where} loss {loss:.2f}, {stages['total']:.0f} ms, "
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


def show_machine() -> None:
    """Print what `rdt-doctor` finds on this machine; a slow path does not stop the demo."""
    from rdt_transport.doctor import as_text, diagnose, examine

    with console.status("rdt-doctor: which path reads take here"):
        found = examine()
    print(as_text(found, diagnose(found)), end="\n\n")


def main(
    model: Annotated[Model, typer.Option(help="architecture to train and serve")] = Model.QWEN3,
    tp: Annotated[int, typer.Option(min=1, max=2, help="workers of vLLM")] = 2,
    syncs: Annotated[int, typer.Option(min=1, help="how often to sync")] = 4,
    json: Annotated[Path | None, typer.Option(help="write the results there")] = None,
    doctor: Annotated[
        bool, typer.Option("--doctor", help="first see which path reads take here")
    ] = False,
) -> None:
    """Watch a real vLLM follow a model in training, exactly.

    The JSON is {"schema": 1, "model", "tp", "syncs"}; a sync has epoch, exact, bytes_compared,
    bytes_pulled and bytes_landed (one number a worker), stage_milliseconds and token_ids.
    """
    if json is not None and not json.parent.is_dir():
        raise typer.BadParameter(f"{json.parent} is no folder", param_hint="--json")
    if doctor:
        show_machine()
    with tempfile.TemporaryDirectory(prefix="rdt-demo-") as name:
        folder = Path(name)
        with actors(model, tp, folder) as (trainer, server, num_bytes):
            done = [one_sync(trainer, server, epoch, folder) for epoch in range(1, syncs + 1)]
            last = str(folder / f"epoch{syncs}")
            flipped = answer(server.check.remote(last, PROMPT, FLIPPED), "flipping a byte")
    report = DemoReport(model.value, tp, done, num_bytes)
    Console(width=max(console.width, TABLE_CHARS)).print(report.table())
    console.print(f"one byte of {FLIPPED} flipped: the check {'passes' if flipped.ok else 'fails'}")
    if json is not None:
        report.write(json)
    if flipped.ok or not all(sync.exact for sync in done):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
