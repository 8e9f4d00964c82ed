import pytest

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
