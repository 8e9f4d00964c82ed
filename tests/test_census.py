"""The census: a cut of it against the published table, and that it can fail."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from census.as_found import Portrait
from census.comparison import differences, patterns, zeroed
from census.forks import Forks, Job
from census.implementations import Implementation
from census.modes import ALL_MODES, Mode
from census.outcome import Outcome, Status, overpulling
from census.rows import Results, Row
from census.tables import summary, write_tables
from census.together import ignored, merged

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "docs" / "model-support.json"

# One or two of each kind.
CUT = (
    "LlamaForCausalLM",  # dense
    "Qwen3ForCausalLM@tied",
    "LlamaForCausalLM@vocab250",  # padded vocabulary
    "Qwen3MoeForCausalLM",  # experts
    "DeepseekV3ForCausalLM",  # latent attention
    "DeepseekV3ForCausalLM@fp32",  # casts
    "Qwen3NextForCausalLM",  # linear and full attention
    "Mamba2ForCausalLM",  # state space
    "GptOssForCausalLM",  # attention sinks
    "Gemma3ForConditionalGeneration",  # multimodal
    "LlamaForCausalLM@awq",  # quantised, and served
    "Qwen3MoeForCausalLM@fp8block",  # quantised experts, which no worker serves yet
)


def census(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own: it patches vLLM."""
    command = [sys.executable, "-m", "census", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def rows_in(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()[1:]]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_cut_is_as_published(tmp_path: Path) -> None:
    """With other weights than the published table's: what is exact does not depend on values."""
    results = tmp_path / "rows.jsonl"
    ended = census("--archs", ",".join(CUT), "--seed", "1", "--results", str(results))

    found = rows_in(results)
    assert [row for row in found if row["status"] == "wrong"] == []
    assert ended.returncode == 0, ended.stdout + ended.stderr
    keys = ("arch", "mode", "status", "reason")
    published = [row for row in json.loads(PUBLISHED.read_text()) if row["arch"] in CUT]
    by_case: Callable[[dict[str, Any]], Any] = lambda row: (row["arch"], row["mode"])  # noqa: E731
    assert sorted(({k: row[k] for k in keys} for row in found), key=by_case) == sorted(
        published, key=by_case
    )


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("impl", list(Implementation))
@pytest.mark.parametrize("damage", ["flip", "drop"])
def test_a_damaged_replay_is_wrong(impl: str, damage: str, tmp_path: Path) -> None:
    results = tmp_path / "rows.jsonl"
    archs = "LlamaForCausalLM,Qwen3MoeForCausalLM"
    ended = census(
        *("--archs", archs, "--modes", "tp2r1", "--impl", impl),
        *("--damage", damage, "--results", str(results)),
    )
    found = rows_in(results)
    assert [row["status"] for row in found] == ["wrong", "wrong"], ended.stdout + ended.stderr
    how = "other values" if damage == "flip" else "unwritten values"
    assert all(row["reason"].endswith(how) for row in found)
    assert ended.returncode == (1 if impl == Implementation.OURS else 0)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_all_ranks_together_pull_every_name(tmp_path: Path) -> None:
    """But for what vLLM's own loaders make nothing of, which is said."""
    results = tmp_path / "rows.jsonl"
    archs = "LlamaForCausalLM,Qwen3MoeForCausalLM,BertModel"
    census("--archs", archs, "--modes", "tp4,ep4", "--results", str(results))
    found = {(row["arch"], row["mode"]): (row["status"], row["reason"]) for row in rows_in(results)}
    assert found == {
        ("LlamaForCausalLM", "tp4"): ("exact", ""),
        ("Qwen3MoeForCausalLM", "tp4"): ("exact", ""),
        ("Qwen3MoeForCausalLM", "ep4"): ("exact", ""),
        ("BertModel", "tp4"): (
            "exact",
            "vLLM's own loaders ignore pooler.dense.bias, pooler.dense.weight",
        ),
    }


# ---- its parts ---------------------------------------------------------------------------------


def model(value: float = 1.0) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made.register_buffer("scale", torch.ones(3))
    made.plain = torch.full((2,), value)
    made.notes = {"sizes": [1, 2]}
    for param in made.parameters():
        nn.init.constant_(param, value)
    return made


def test_equal_models_do_not_differ_and_every_kind_of_tensor_counts() -> None:
    assert differences(model(), model()) == []
    found = differences(model(1.0), model(2.0))
    assert found == [f"{name} has other values" for name in
                     ("0.bias", "0.weight", "1.bias", "1.weight", "plain")]  # fmt: skip
    changed = model()
    changed.get_buffer("scale")[0] = float("nan")
    assert differences(model(), changed) == ["scale has unwritten values"]
    changed.scale = torch.ones(3, dtype=torch.float64)
    assert "scale is (3,) of torch.float64" in differences(model(), changed)[0]
    del changed.scale
    assert differences(model(), changed) == ["scale is missing"]
    assert differences(changed, model()) == ["scale is new"]


def test_a_zero_of_the_other_sign_differs() -> None:
    assert differences(model(0.0), model(-0.0)) != []


def test_zeros_may_be_where_a_load_wrote_nothing() -> None:
    expected, found = model(), model()
    for made, value in ((expected, float("nan")), (found, 0.0)):
        made.get_buffer("scale")[0] = value
    assert differences(expected, found) == []
    assert zeroed(expected, found) == ["scale"]
    assert differences(found, expected) == ["scale has unwritten values"]
    found.get_buffer("scale")[1] = 5.0
    assert differences(expected, found) == ["scale has other values"]
    found.get_buffer("scale")[:2] = torch.tensor([2.0, 1.0])
    assert differences(expected, found) == ["scale has other values"]
    assert zeroed(expected, expected) == []


def test_phrases_that_differ_in_indices_are_told_once() -> None:
    assert patterns(["layers.0.w lacks a part", "layers.11.w lacks a part", "norm"]) == (
        "layers.#.w lacks a part (2 times), norm"
    )


def _replace(made: Any) -> None:
    made[0].weight = nn.Parameter(made[0].weight.detach().clone())


def _write(made: Any) -> None:
    with torch.no_grad():
        made[1].running_mean[1] = 5


def _stamp(made: Any) -> None:
    made[0].weight.weight_loader = print


def _append(made: Any) -> None:
    made.notes["sizes"].append(3)


def _hook(made: Any) -> None:
    made[0].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [_replace, _write, _stamp, _append, _hook])
def test_a_portrait_sees_every_change(change: Callable[[Any], None]) -> None:
    made = model()
    portrait = Portrait(made)
    assert portrait.changes() == []
    change(made)
    assert portrait.changes() != []


def _end_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_ever() -> None:
    signal.pause()


def _raise() -> None:
    raise KeyError("w")


def test_forks_report_values_errors_deaths_and_deadlines(tmp_path: Path) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "value": lambda: 7,
        "error": _raise,
        "death": _end_by_signal,
        "deadline": _wait_for_ever,
    }
    ended: dict[str, tuple[Any, str]] = {}
    more: list[Job] = []

    def job(name: str) -> Job:
        def done(value: Any, failure: str) -> None:
            ended[name] = value, failure
            if name == "value":
                more.append(Job(lambda: 8, tmp_path / "after", lambda *end: order.append(end)))

        return Job(calls[name], tmp_path / name, done)

    order: list[tuple[Any, str]] = []
    Forks(2, timeout_seconds=2).run(map(job, calls), more)
    assert ended["value"] == (7, "") and order == [(8, "")]
    assert ended["error"][0] is None and "KeyError" in ended["error"][1]
    assert "signal 9" in ended["death"][1]
    assert "more than 2 s" in ended["deadline"][1]


def row(arch: str, mode: str, status: Status, *, pulled: int = 0, landed: int = 0) -> Row:
    reason = "" if status is Status.EXACT else f"{status} | because"
    return Row(arch, mode, Outcome(status, reason, pulled, landed))


def exact(*unread: str, note: str = "") -> Outcome:
    return Outcome(Status.EXACT, note, 2, 1, frozenset(unread))


def test_what_no_rank_reads_is_wrong_unless_a_load_ignores_it() -> None:
    assert merged([exact("a")]) == exact("a")
    together = merged([exact("a", "w.1", "w.2"), exact("b", "w.1", "w.2")])
    assert together == Outcome(Status.EXACT, "", 4, 2, frozenset({"w.1", "w.2"}))
    lost = ignored(together, ["layer.weight has other values"])
    assert lost.status is Status.WRONG
    assert lost.reason.startswith("no rank reads w.# (2 times), and a normal load does: layer.w")
    kept = ignored(together, [])
    assert (kept.status, kept.reason) == (
        Status.EXACT, "vLLM's own loaders ignore w.# (2 times)",
    )  # fmt: skip


def test_the_worst_rank_counts() -> None:
    refused = Outcome(Status.REFUSED, "because")
    assert merged([exact(), refused, exact()]) == Outcome(Status.REFUSED, "rank 1: because")
    unbuildable = Outcome(Status.UNBUILDABLE, "too many")
    assert merged([exact(), unbuildable]).status is Status.UNBUILDABLE
    assert merged([unbuildable, refused, Outcome(Status.WRONG, "w")]).reason == "rank 2: w"
    assert merged([exact(), exact(note="padding")]).reason == "padding"


ROWS = [
    row("B", "tp2r1", Status.REFUSED),
    row("B", "tp1r0", Status.EXACT, pulled=100, landed=100),
    row("a", "tp1r0", Status.EXACT, pulled=106, landed=100),
    row("a", "tp2r1", Status.UNBUILDABLE),
    row("C", "tp1r0", Status.UNBUILDABLE),
]


def test_results_go_on_where_they_ended_and_keep_to_their_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = Results(path, {"seed": 0})
    for each in ROWS:
        first.add(each)
    assert list(Results(path, {"seed": 0}).rows.values()) == ROWS
    with pytest.raises(ValueError, match="name another file"):
        Results(path, {"seed": 1})


@pytest.mark.parametrize("implementation", list(Implementation))
def test_the_tables_are_in_a_stable_order(implementation: Implementation, tmp_path: Path) -> None:
    modes = ["tp1r0", "tp2r1"]
    written = write_tables(ROWS, implementation, modes, "0.32.0", tmp_path)
    before = [path.read_text() for path in written]
    write_tables(ROWS[::-1], implementation, modes, "0.32.0", tmp_path)
    assert [path.read_text() for path in written] == before
    text, rows = before
    assert [(r["arch"], r["mode"]) for r in json.loads(rows)] == [
        ("a", "tp1r0"), ("a", "tp2r1"), ("B", "tp1r0"), ("B", "tp2r1"), ("C", "tp1r0"),
    ]  # fmt: skip
    assert set(json.loads(rows)[0]) == {"arch", "mode", "status", "reason"}
    assert "| a | exact | unbuildable |" in text and "| B | exact | refused |" in text
    assert "| refused \\| because | B (tp2r1) |" in text


def test_the_summary_counts_an_architecture_by_the_ranks_that_can_be_built() -> None:
    assert summary(ROWS) == (
        "3 architectures and variants: 1 exact, 1 refused, 0 wrong, 1 unbuildable; 5 cases"
    )


def test_pulling_much_more_than_lands_is_wrong() -> None:
    assert overpulling(105, 100) == overpulling(0, 0) == ""
    assert overpulling(106, 100).startswith("pulls 1.06 bytes for each byte that lands")
    assert overpulling(1, 0).startswith("pulls inf")


def test_modes_are_parsed_and_spelled_alike() -> None:
    assert [Mode.parse(str(mode)) for mode in ALL_MODES] == list(ALL_MODES)
    assert Mode.parse("ep4").ranks == tuple(map(Mode.parse, ("ep4r0", "ep4r1", "ep4r2", "ep4r3")))
    assert Mode.parse("tp2r1").ranks == (Mode.parse("tp2r1"),)
    for wrong in ("tp0", "tp", "tp2r2", "pp2r0"):
        with pytest.raises(ValueError, match="expected a mode"):
            Mode.parse(wrong)
