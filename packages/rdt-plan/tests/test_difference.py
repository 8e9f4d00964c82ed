from dataclasses import replace

import pytest

from rdt_plan import Manifest, ParamMeta
from rdt_plan.difference import first_difference

PARAMS = [ParamMeta("a", "int8", (2,)), ParamMeta("b", "int8", (3,)), ParamMeta("c", "int8", (4,))]


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (PARAMS, ""),
        (PARAMS[:2], "'c' is declared by ours, not by theirs"),
        ([*PARAMS, ParamMeta("d", "int8", ())], "'d' is declared by theirs, not by ours"),
        ([PARAMS[0], PARAMS[2], PARAMS[1]], "parameter 1 is 'b' on ours, 'c' on theirs"),
        (
            [PARAMS[0], replace(PARAMS[1], shape=(3, 1)), replace(PARAMS[2], dtype="bool")],
            "'b': shape is (3,) on ours, (3, 1) on theirs",
        ),
        (
            [*PARAMS[:2], replace(PARAMS[2], owners=(0, 1))],
            "'c': owners is (0,) on ours, (0, 1) on theirs",
        ),
    ],
)
def test_the_first_difference_is_named(other: list[ParamMeta], sentence: str) -> None:
    found = first_difference(Manifest.build(PARAMS), Manifest.build(other), ("ours", "theirs"))
    assert found == sentence
