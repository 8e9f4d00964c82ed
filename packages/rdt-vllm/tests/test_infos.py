import json

import pytest

from rdt_plan import ConsumerId, EpochRecord
from rdt_vllm.errors import InitInfoError

pytestmark = pytest.mark.engine


def test_the_token_is_not_shown() -> None:
    from rdt_vllm.infos import RdtInitInfo

    info = RdtInitInfo(address="host:1", job="job", token="secret")

    assert info.token == "secret"
    assert "secret" not in f"{info!r} {info}"


@pytest.mark.parametrize("timeout_seconds", [0, -1.0, float("nan")])
def test_a_deadline_is_positive(timeout_seconds: float) -> None:
    from rdt_vllm.infos import RdtInitInfo

    with pytest.raises(InitInfoError, match="must be positive"):
        RdtInitInfo("host:1", "job", "secret", timeout_seconds=timeout_seconds)


def test_read_threads_are_not_negative_and_suit_the_device_when_left_out() -> None:
    from rdt_vllm.infos import RdtInitInfo

    with pytest.raises(InitInfoError, match="read_threads must not be negative, found -1"):
        RdtInitInfo("host:1", "job", "secret", read_threads=-1)
    assert RdtInitInfo("host:1", "job", "secret").num_read_threads("cpu") == 0
    assert RdtInitInfo("host:1", "job", "secret", read_threads=0).num_read_threads("cuda") == 0
    assert RdtInitInfo("host:1", "job", "secret", read_threads=7).num_read_threads("cpu") == 7


def test_the_wire_is_made_that_the_trainer_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from rdt_transport.wire import ray
    from rdt_vllm.infos import RdtInitInfo

    with pytest.raises(InitInfoError, match="the field wire: there is no wire 'rdma'"):
        RdtInitInfo("host:1", "job", "secret", wire="rdma")
    made: list[object] = []
    monkeypatch.setattr(ray, "RayWire", lambda *a, **k: made.append((*a, k)))
    told = RdtInitInfo("host:1", "job", "secret", wire="ray", ray_address="10.0.0.1:6379")
    told.make_wire("worker", "cpu")
    RdtInitInfo("host:1", "job", "secret", wire="ray:X").make_wire("worker", "cpu")
    reading = {"serves": False, "transport": "NIXL", "address": "10.0.0.1:6379"}
    other = {"serves": False, "transport": "X", "address": "auto"}
    assert made == [("worker", reading), ("worker", other)]


def test_an_update_brings_the_record_of_its_epoch() -> None:
    from rdt_vllm.infos import RdtUpdateInfo

    live = ((ConsumerId(0, 0), "a" * 32), (ConsumerId(0, 1), "b" * 32))
    record = EpochRecord("c" * 32, 7, live)
    assert RdtUpdateInfo(**record.to_json()).record == record  # as a call in one process has it
    assert RdtUpdateInfo(**json.loads(json.dumps(record.to_json()))).record == record
    assert RdtUpdateInfo(record.session, 7).record is None
    with pytest.raises(InitInfoError, match=r"no epoch's record: live\[0\]"):
        _ = RdtUpdateInfo(record.session, 7, [["a"]]).record
