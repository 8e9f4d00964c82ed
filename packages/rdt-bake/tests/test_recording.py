from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from rdt_bake import CoverageError, Recording, record, report
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.b = nn.Linear(4, 3, dtype=torch.bfloat16)
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("never_loaded", torch.zeros(3))
        self.requires_grad_(False)


PARAMS = [
    ParamMeta("w", "float32", (3, 4)),
    ParamMeta("unknown", "float32", (3, 4)),
    ParamMeta("half", "float32", (3, 2)),
]


def recorded(**kwargs) -> Recording:
    model = Model()

    def load(pairs: Pairs) -> None:
        for name, weight in pairs:
            if name == "w":
                model.a.weight.copy_(weight)
            elif name == "half":
                model.b.weight[:, 1:3].copy_(weight)
        model.a.bias[1].fill_(1)

    return record(model, load, PARAMS, **kwargs)


def test_coverage_is_by_region_and_grouped_by_module() -> None:
    found = {f"{each.module}.{each.param}": each for each in recorded().uncovered}
    assert list(found) == [".scalar", "a.bias", "b.weight", "b.bias"]
    assert found["a.bias"].num_missing == 2 and found["a.bias"].bounds == ((0, 3),)
    assert found["b.weight"].num_missing == 6 and found["b.weight"].bounds == ((0, 3), (0, 4))
    assert found[".scalar"].num_missing == 1 and found[".scalar"].bounds == ()
    with pytest.raises(CoverageError) as caught:
        recorded().require_coverage()
    assert len(caught.value.uncovered) == 4
    message = str(caught.value)
    assert message.count("module 'b':") == 1
    assert "b.weight (3x4): 6 elements missing" in message and "exempt" in message


def test_exempt_parameters_may_stay_unwritten() -> None:
    asked = []

    def exempt(module: str, param: str) -> bool:
        asked.append((module, param))
        return module == "b" or param in ("bias", "scalar")

    recording = recorded(exempt=exempt)
    assert recording.uncovered == ()
    recording.require_coverage()
    assert ("", "never_loaded") not in asked and ("", "empty") not in asked


def test_nothing_loaded_at_all() -> None:
    model = Model()
    recording = record(model, lambda pairs: None, PARAMS)
    assert recording.ignored == ("w", "unknown", "half") and recording.writes == ()
    assert sum(each.num_missing for each in recording.uncovered) == 12 + 3 + 12 + 3 + 1


def test_the_report_says_what_matters() -> None:
    text = report(recorded())
    assert "2 weights land in 2 modules by 2 copies and 1 fills" in text
    assert "2 distinct slices of 72 bytes" in text
    assert "cast float32 -> bfloat16: 1 copies" in text
    assert "1 weights that nothing reads:\n  unknown" in text
    assert "4 parameters not wholly written:" in text
    assert "b.weight (3x4): 6 elements missing" in text


def test_the_report_cuts_long_lists() -> None:
    params = [ParamMeta(f"w{n}", "float32", (1,)) for n in range(25)]
    text = report(record(nn.Module(), lambda pairs: None, params))
    assert "25 weights that nothing reads:" in text and "... and 15 more" in text
    assert "w9" in text and "w10" not in text
