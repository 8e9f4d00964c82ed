"""What the demo shows and writes: a table for people, one JSON object for programs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

__all__ = ["DemoReport", "Sync"]


@dataclass(frozen=True, slots=True)
class Sync:
    """One sync. Lists have one entry a worker.

    Attributes:
        epoch: its number.
        exact: every worker's weights and logits equal a fresh model's, bit for bit.
        bytes_compared: parameter bytes held against the fresh model's.
        bytes_pulled: bytes read from the trainer.
        bytes_landed: bytes written into parameters.
        stage_milliseconds: begin, gather, publish, wait, finish and total of the trainer; read and
            scatter of the slowest worker, which overlap them.
        token_ids: greedy tokens after it.
    """

    epoch: int
    exact: bool
    bytes_compared: list[int]
    bytes_pulled: list[int]
    bytes_landed: list[int]
    stage_milliseconds: dict[str, float]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The whole run."""

    model: str
    tp: int
    syncs: list[Sync]
    model_bytes: int

    def table(self) -> Table:
        """One row a sync; bytes are a line a worker."""
        table = Table(title=f"{self.model}, tensor parallel over {self.tp}")
        for column in ("epoch", "pulled", "compared", "share", *self.syncs[0].stage_milliseconds):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("exact", no_wrap=True)
        table.add_column("greedy tokens", no_wrap=True)
        for sync in self.syncs:
            table.add_row(
                str(sync.epoch),
                "\n".join(f"{n:,}" for n in sync.bytes_pulled),
                "\n".join(f"{n:,}" for n in sync.bytes_compared),
                "\n".join(f"{n / self.model_bytes:.0%}" for n in sync.bytes_pulled),
                *(f"{value:.1f}" for value in sync.stage_milliseconds.values()),
                "yes" if sync.exact else "NO",
                " ".join(map(str, sync.token_ids)),
            )
        table.caption = (
            "pulled and compared: bytes a worker; share: of the model; stages: milliseconds; "
            "read and scatter: of the slowest worker, beside the others"
        )
        return table

    def write(self, path: Path) -> None:
        """The report as JSON, schema 1."""
        syncs = [asdict(sync) for sync in self.syncs]
        value = {"schema": 1, "model": self.model, "tp": self.tp, "syncs": syncs}
        path.write_text(json.dumps(value, indent=2) + "\n")
