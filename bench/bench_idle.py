"""What being attached to a job costs a vLLM worker that has nothing to pull.

Run with `hatch run bench-idle`. One real vLLM with a tiny model, on CPU, TP=1, is
attached to a trainer in this process and detached again, in turn. Measured each time: the CPU time
that all threads of all processes of the engine take while it idles, as a share of one core, and
the tokens it generates a CPU second. This process, with the trainer in it, is not counted.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.report import DEFAULT_PROMPT, greedy_tokens
from rdt_vllm.testing.serving import serving
from rdt_vllm.testing.single_trainer import SingleTrainer
from rdt_vllm.testing.tiny_models import TINY_QWEN3

SETTLE_SECONDS = 3.0  # a wire is polled faster for a second after anything happened
NUM_TOKENS = 48
NUM_PROMPTS = 20


def cpu_seconds() -> float:
    """User and system time so far of every process below this one."""
    children = psutil.Process().children(recursive=True)
    times = [child.cpu_times() for child in children]
    return sum(each.user + each.system for each in times)


def share_of_a_core(action: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of the engine while ``action`` runs."""
    began, before = time.perf_counter(), cpu_seconds()
    action()
    return cpu_seconds() - before, time.perf_counter() - began


def main(
    seconds: Annotated[float, typer.Option(help="of one idle measurement")] = 30.0,
    pairs: Annotated[int, typer.Option(help="of attached and not")] = 3,
) -> None:
    """Idle cores and tokens a CPU second of one worker, attached and not; a table, a JSON line."""
    model = TINY_QWEN3.build(seed=1)
    idle: dict[bool, list[float]] = {True: [], False: []}
    speed: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        with serving(write_checkpoint(model, Path(folder) / "model")) as llm:
            trainer = SingleTrainer(llm, model.state_dict())

            def generate() -> None:
                for _ in range(NUM_PROMPTS):
                    greedy_tokens(llm, DEFAULT_PROMPT, NUM_TOKENS)

            try:
                generate()
                for number in range(2 * pairs):
                    attached = number % 4 in (1, 2)  # both orders
                    if attached:
                        trainer.attach()
                    time.sleep(SETTLE_SECONDS)
                    spent, wall = share_of_a_core(lambda: time.sleep(seconds))
                    idle[attached].append(spent / wall)
                    spent, _ = share_of_a_core(generate)
                    speed[attached].append(NUM_PROMPTS * NUM_TOKENS / spent)
                    if attached:
                        llm.shutdown_weight_transfer_engine()
            finally:
                trainer.close()

    table = Table("", "attached", "not attached", "each time")
    for what, found, digits in (
        ("idle, cores", idle, 5),
        ("tokens a CPU second", speed, 1),
    ):
        medians = [f"{statistics.median(found[attached]):.{digits}f}" for attached in (True, False)]
        each = [" ".join(f"{v:.{digits}f}" for v in found[state]) for state in (True, False)]
        table.add_row(what, *medians, " | ".join(each))
    Console().print(table)
    cores = {attached: statistics.median(idle[attached]) for attached in (True, False)}
    tokens = {attached: statistics.median(speed[attached]) for attached in (True, False)}
    line = {
        "bench": "idle",
        "idle_cores_attached": round(cores[True], 5),
        "idle_cores_unattached": round(cores[False], 5),
        "idle_ratio": round(cores[True] / cores[False], 3),
        "tokens_per_cpu_second_ratio": round(tokens[True] / tokens[False], 3),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    typer.run(main)
