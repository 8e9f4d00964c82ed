import hashlib

import pytest

from rdt_plan import canonical_json, digest_of


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": [1, True], "a": "é\ud800"}) == rb'{"a":"\u00e9\ud800","b":[1,true]}'
    assert canonical_json(((1,), [])) == b"[[1],[]]"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_canonical_json_has_no_nan(value: float) -> None:
    with pytest.raises(ValueError):
        canonical_json(value)


def test_digest_is_sha256_of_kind_and_value() -> None:
    assert digest_of("plan", [1]) == hashlib.sha256(b'["plan",[1]]').hexdigest()
