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
