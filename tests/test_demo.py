"""What the demo writes and shows, without running it."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from examples.demo.__main__ import Model
from examples.demo.report import DemoReport, Sync
from examples.demo.trainer import DemoTrainer

SYNC = Sync(
    epoch=1,
    exact=True,
    bytes_compared=[100, 100],
    bytes_pulled=[96, 100],
    bytes_landed=[96, 96],
    stage_milliseconds={"gather": 1.5, "read": 0.25, "total": 3.0},
    token_ids=[4, 5, 6],
)


def shown(report: DemoReport) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(report.table())
    return console.file.getvalue()


def test_the_json_has_schema_1(tmp_path: Path) -> None:
    DemoReport("qwen3", 2, [SYNC], 200).write(tmp_path / "demo.json")

    assert json.loads((tmp_path / "demo.json").read_text()) == {
        "schema": 1,
        "model": "qwen3",
        "tp": 2,
        "syncs": [
            {
                "epoch": 1,
                "exact": True,
                "bytes_compared": [100, 100],
                "bytes_pulled": [96, 100],
                "bytes_landed": [96, 96],
                "stage_milliseconds": {"gather": 1.5, "read": 0.25, "total": 3.0},
                "token_ids": [4, 5, 6],
            }
        ],
    }


def test_the_table_has_a_column_a_stage_and_a_line_a_worker() -> None:
    text = shown(DemoReport("qwen3", 2, [SYNC], 200))

    for cell in ("gather", "read", "total", "48%", "50%", "0.2", "yes", "4 5 6"):
        assert cell in text


def test_a_sync_that_is_not_exact_is_shown() -> None:
    wrong = Sync(2, False, [1], [1], [1], {"total": 1.0}, [1])

    assert "NO" in shown(DemoReport("llama", 1, [wrong], 2))


@pytest.mark.parametrize("model", Model)
def test_what_is_trained_is_served_as_it_is_written_down(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of this process, for good
    trainer = DemoTrainer(model.value)
    before = {name: tensor.clone() for name, tensor in trainer.source().iter_full()}
    trainer.train(1)
    trainer.save(str(tmp_path))
    written = load_file(tmp_path / "model.safetensors")
    served = dict(trainer.source().iter_full())

    assert served.keys() == written.keys()
    assert all(torch.equal(served[name], written[name]) for name in written)
    assert not torch.equal(served["model.norm.weight"], before["model.norm.weight"])
