import json
import re
from typing import Any

import pytest
from hypothesis import given

from rdt_plan import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    ChunkTable,
    ConsumerId,
    Fill,
    Manifest,
    ParamMeta,
    Placement,
    Slice,
    SyncPlan,
    WireFormatError,
    build_plan,
    decode_manifest,
    decode_message,
    decode_plan,
    decode_table,
    encode_manifest,
    encode_message,
    encode_plan,
    encode_table,
)
from rdt_plan import wire as wire_module
from rdt_plan.testing import plans
from rdt_plan.wire import manifest_names

MANIFEST = Manifest.build(
    [
        ParamMeta("embed", "bfloat16", (4, 2), (0, 1)),
        ParamMeta("l.0.w", "float32", (), (0,), (1,), ("replicate",)),
    ]
)
GOLDEN_MANIFEST = (
    b'{"body":{"groups":[["pre",1],["l.0",1]],"params":['
    b'["embed","bfloat16",[4,2],[0,1],[],[]],["l.0.w","float32",[],[0],[1],["replicate"]]]},'
    b'"kind":"manifest","v":4}'
)


def golden_plan() -> SyncPlan:
    manifest = Manifest.build([ParamMeta("embed", "bfloat16", (4, 2), (0, 1))])
    slice_ = Slice("embed", "bfloat16", 2, (4,), (1,))
    copy = Placement(slice_, "emb", "weight", 0, (2, 2), (2, 1), "bfloat16", (2, 1))
    fills = [
        Fill("emb", "weight", 4, (2, 2), (2, 1), "bfloat16", value)
        for value in (0, True, 0.5, float("-inf"))
    ]
    return build_plan(manifest, [copy, *fills], ConsumerId(3, 1), num_workers=2)


SERVE = '[0,0,0,8,[["embed","bfloat16",2,[4],[1]]],[0]]'
MANIFEST_DIGEST = golden_plan().manifest_digest
PLAN_DIGEST = golden_plan().digest
GOLDEN_TABLE = (
    f'{{"body":{{"chunks":[[0,0,0,8,1]],"names":["embed"],"num_slots":2,"owner":1,'
    f'"plan_digest":"{PLAN_DIGEST}","regions":[["bfloat16",2,[4],[1]]],"slices":[0],'
    f'"slot_bytes":16}},"kind":"chunk_table","v":4}}'
).encode()
NUMBERED_TABLE = GOLDEN_TABLE.replace(b'["embed"]', b"[0]")
GOLDEN_PLAN = (
    f'{{"body":{{"chunks":[[0,1,{SERVE},0,'
    f'[[0,"emb","weight",0,[2,2],[2,1],"bfloat16",[2,1]]],["emb"],["emb"]]],"consumer":[3,1],'
    f'"fills":[["emb","weight",4,[2,2],[2,1],"bfloat16",0],'
    f'["emb","weight",4,[2,2],[2,1],"bfloat16",true],'
    f'["emb","weight",4,[2,2],[2,1],"bfloat16","0x1.0000000000000p-1"],'
    f'["emb","weight",4,[2,2],[2,1],"bfloat16","-inf"]],'
    f'"manifest_digest":"{MANIFEST_DIGEST}","max_chunk_bytes":67108864,'
    f'"modules_without_chunks":[],"num_slots":2,"programs":[],"schedule":[0]}},'
    f'"kind":"sync_plan","v":4}}'
).encode()


def decode_own_table(data: bytes) -> ChunkTable:
    return decode_table(data, ConsumerId(3, 1))


def decode_numbered(data: bytes) -> ChunkTable:
    return decode_table(data, ConsumerId(3, 1), ("embed", "l.0.w"))


FREE_LISTS = {  # those whose lengths nothing else in the golden message fixes
    decode_manifest: {
        ("body", "params", 0, 2),  # a shape
    },
    decode_own_table: set(),
    decode_numbered: set(),
    decode_plan: {
        ("body", "chunks"),
        ("body", "chunks", 0, 4),  # placements
        ("body", "chunks", 0, 5),  # materialize
        ("body", "chunks", 0, 6),  # complete
        ("body", "fills"),
    },
}


def test_golden_messages() -> None:
    plan = golden_plan()
    assert encode_manifest(MANIFEST) == GOLDEN_MANIFEST
    assert encode_table(plan.table(1)) == GOLDEN_TABLE
    assert encode_table(plan.table(1), {"embed": 0, "l.0.w": 1}) == NUMBERED_TABLE
    assert encode_plan(plan) == GOLDEN_PLAN
    assert decode_manifest(GOLDEN_MANIFEST) == MANIFEST
    assert manifest_names(GOLDEN_MANIFEST) == ("embed", "l.0.w")
    assert decode_own_table(GOLDEN_TABLE) == decode_numbered(GOLDEN_TABLE) == plan.table(1)
    assert decode_numbered(NUMBERED_TABLE) == plan.table(1)
    assert decode_plan(GOLDEN_PLAN) == plan
    types = [type(fill.value) for fill in decode_plan(GOLDEN_PLAN).fills]
    assert types == [int, bool, float, float]


def test_golden_digests() -> None:
    assert MANIFEST.digest == "ee7a9c693351fe2d38b789cda692b64572d92d2d75c5b2a31ba5161421a151c3"
    assert PLAN_DIGEST == "d95bc724ae258fd8a26adb12c394daca18e6919ebab9a58369c0f7b78b52e970"


@pytest.mark.parametrize("old", [b'"embed"', b"[4,2],", b'"groups"'])
def test_names_of_what_is_no_manifest_are_refused(old: bytes) -> None:
    with pytest.raises(WireFormatError):
        manifest_names(GOLDEN_MANIFEST.replace(old, b"1" if old[0] != b"["[0] else b"", 1))


@given(plans(direct=True))
def test_round_trips(case) -> None:
    manifest, _, _, plan = case
    assert decode_manifest(encode_manifest(manifest)) == manifest
    again = decode_plan(encode_plan(plan))
    assert again == plan
    assert again.digest == plan.digest
    for owner in plan.owners:
        table = plan.table(owner)
        assert decode_table(encode_table(table), table.consumer) == table
        numbered = encode_table(table, manifest.numbers)
        assert decode_table(numbered, table.consumer, manifest.names) == table


@pytest.mark.parametrize(
    ("decode", "golden"),
    [
        (decode_manifest, GOLDEN_MANIFEST),
        (decode_own_table, GOLDEN_TABLE),
        (decode_numbered, NUMBERED_TABLE),
        (decode_plan, GOLDEN_PLAN),
    ],
)
class TestStrict:
    def test_another_version_names_both(self, decode, golden: bytes) -> None:
        data = golden.replace(b'"v":4', b'"v":7')
        with pytest.raises(WireFormatError, match=r"wire version 7: expected version 4"):
            decode(data)

    @pytest.mark.parametrize("version", [b"true", b"1.0", b'"1"', b"null", b"[1]"])
    def test_the_version_is_an_integer(self, decode, golden: bytes, version: bytes) -> None:
        with pytest.raises(WireFormatError):
            decode(golden.replace(b'"v":4', b'"v":' + version))

    def test_another_kind(self, decode, golden: bytes) -> None:
        data = re.sub(rb'"kind":"\w+"', b'"kind":"letter"', golden)
        with pytest.raises(WireFormatError, match="found kind 'letter'"):
            decode(data)

    def test_every_prefix_and_noise(self, decode, golden: bytes) -> None:
        for end in range(len(golden)):
            with pytest.raises(WireFormatError):
                decode(golden[:end])
        for data in (golden + b"}", b"\xff" + golden, b"[" * 100_000, b"9" * 5000, b"NaN"):
            with pytest.raises(WireFormatError):
                decode(data)

    def test_every_value_of_a_wrong_type_or_sign(self, decode, golden: bytes) -> None:
        """Each value of the message in turn becomes something that is never right there."""
        accepted = []
        for path in paths(json.loads(golden)):
            for wrong in (None, -1, 1.5, {"x": 1}, 1 << 63):
                message = json.loads(golden)
                assign(message, path, wrong)
                if not refused(decode, message):
                    accepted.append((path, wrong))
        assert [each for each in accepted if not is_free(*each)] == []

    def test_every_list_that_is_longer(self, decode, golden: bytes) -> None:
        accepted = []
        for path in paths(json.loads(golden)):
            message = json.loads(golden)
            value = at(message, path)
            if isinstance(value, list) and value:
                value.append(value[-1])
                if not refused(decode, message):
                    accepted.append(path)
        assert set(accepted) == FREE_LISTS[decode]

    def test_every_foreign_key(self, decode, golden: bytes) -> None:
        for path in ([], ["body"]):
            message = json.loads(golden)
            at(message, path)["extra"] = 0
            assert refused(decode, message)

    def test_a_missing_or_repeated_key(self, decode, golden: bytes) -> None:
        for path in paths(json.loads(golden)):
            message = json.loads(golden)
            *parents, key = path
            if isinstance(key, str):
                del at(message, parents)[key]
                with pytest.raises(WireFormatError):
                    decode(json.dumps(message).encode())
        with pytest.raises(WireFormatError, match="each key once"):
            decode(golden[:-1] + b',"v":4}')

    def test_too_large(self, decode, golden: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wire_module, "MAX_MESSAGE_BYTES", len(golden) - 1)
        with pytest.raises(WireFormatError, match=f"of {len(golden)} bytes: expected at most"):
            decode(golden)


def paths(value: Any, prefix: tuple = ()):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        yield (*prefix, key)
        if isinstance(child, dict | list):
            yield from paths(child, (*prefix, key))


def at(value: Any, path) -> Any:
    for key in path:
        value = value[key]
    return value


def assign(value: Any, path, new: Any) -> None:
    at(value, path[:-1])[path[-1]] = new


def refused(decode, message: Any) -> bool:
    try:
        decode(json.dumps(message).encode())
    except WireFormatError:
        return True
    return False


def is_free(path: tuple, value: Any) -> bool:
    """A fill may have any integer for its value, and a table's row no slot: it is direct then."""
    if path[:2] == ("body", "chunks") and path[3:] == (2,):
        return value is None
    return path[:2] == ("body", "fills") and path[3:] == (6,)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"embed"', b'"l.0.w"', r"manifest: 'l\.0\.w' is listed twice"),
        (b'"bfloat16"', b'"bf16"', "manifest: 'embed': unknown dtype 'bf16'"),
        (b"[0,1]", b"[1,0]", "manifest: .embed.: expected owner ranks from 0"),
        (b"[0,1]", b"[]", "held by no rank"),
        (b'["pre",1],', b'["pre",2],', "cuts gather groups differently from group 0"),
        (b',["l.0",1]', b"", "cuts gather groups differently from group 1"),
        (b"[4,2]", b"[4,-2]", r"params\[0\]\.shape: expected an integer of 0 to 2\*\*63-1"),
        (b"[4,2]", b"[4,true]", r"params\[0\]\.shape"),
        (b"[4,2]", b"[4,1e3]", r"params\[0\]\.shape"),
        (b"[4,2]", b"[4,NaN]", "finite"),
    ],
)
def test_bad_manifests_are_refused_with_the_place(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(WireFormatError, match=message):
        decode_manifest(GOLDEN_MANIFEST.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"2,[4],[1]", b"2,[2,2],[2,1]", r"regions\[0\]\.slice: expected the canonical"),
        (b"2,[4],[1]", b"2,[4],[0]", "source_stride"),
        (b"2,[4],[1]", b"2,[4],[1,1]", "one stride a dim"),
        (b'"bfloat16"', b'"bf16"', "unknown dtype"),
        (b'"slices":[0]', b'"slices":[1]', "slices: expected integers below 1, found 1"),
        (b'"slices":[0]', b'"slices":[0,0]', r"names: expected one a slice \(2\), found 1"),
        (b"[1]]],", b'[1]],["int8",0,[4],[1]]],', "regions: expected each once, and none that"),
        (b"[0,0,0,8,1]", b"[0,0,0,8,2]", "num_slices: expected at most 1, found 2"),
        (b"[0,0,0,8,1]", b"[0,0,0,8,0]", "slices: expected those of the chunks, found more"),
        (b'["embed"]', b"[0]", "the manifest that numbers them is unknown"),
        (b'["embed"]', b'["embed",0]', "names: expected a string, found 0"),
        (b'"num_slots":2', b'"num_slots":0', "num_slots: expected at least 1"),
        (PLAN_DIGEST.encode(), b"f" * 63 + b"F", "64 lower-case hexadecimal digits"),
        (PLAN_DIGEST.encode(), b"f" * 63, "64 lower-case hexadecimal digits"),
    ],
)
def test_bad_tables_are_refused_with_the_place(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(WireFormatError, match=message):
        decode_own_table(GOLDEN_TABLE.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'[0,"emb"', b'[1,"emb"', r"placements\[0\]\.slice: expected an index below 1"),
        (b'"bfloat16",[2,1]]', b'"bfloat16",[9,1]]', "packed elements below 4, found one at 10"),
        (b'"bfloat16",[2,1]]', b'"bfloat16",[2]]', "one stride a dim"),
        (b'4,[2,2],[2,1],"bfloat16",0]', b'4,[2,2],[2,0],"bfloat16",0]', "written once"),
        (b'"schedule":[0]', b'"schedule":[1]', "permutation"),
        (b'"schedule":[0]', b'"schedule":[0,0]', "permutation"),
        (b'"-inf"', b'"minus"', r"fills\[3\]\.value: expected a hexadecimal float, found 'minus'"),
        (b'"-inf"', b'"0x1p+9999"', "hexadecimal float"),
    ],
)
def test_bad_plans_are_refused_with_the_place(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(WireFormatError, match=message):
        decode_plan(GOLDEN_PLAN.replace(old, new, 1))


@pytest.mark.parametrize("steps", [b"[2]", b'[0,"embed"]', b"[-1]", b"[0,0]"])
def test_names_beyond_the_manifest_are_refused(steps: bytes) -> None:
    with pytest.raises(WireFormatError, match="names"):
        decode_numbered(NUMBERED_TABLE.replace(b'[0],"num', steps + b',"num', 1))


def test_messages_of_other_packages_use_the_same_envelope() -> None:
    data = encode_message("greeting", {"to": ["all"]})
    assert data == b'{"body":{"to":["all"]},"kind":"greeting","v":%d}' % WIRE_VERSION
    assert decode_message(data, "greeting") == {"to": ["all"]}


def test_a_message_that_is_too_large_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_MESSAGE_BYTES >= 64 << 20
    monkeypatch.setattr(wire_module, "MAX_MESSAGE_BYTES", len(GOLDEN_MANIFEST) - 1)
    with pytest.raises(WireFormatError, match="manifest message of"):
        encode_manifest(MANIFEST)
