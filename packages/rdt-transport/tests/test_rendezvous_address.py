"""Addresses and settings: what a user types, refused by name when it cannot work."""

from typing import Any

import pytest

from rdt_transport.errors import RendezvousError
from rdt_transport.rendezvous import JobSettings, RendezvousAddress


@pytest.mark.parametrize("host", ["127.0.0.1", "trainer-0.cluster", "fe80::1"])
def test_init_info_carries_the_address(host: str) -> None:
    address = RendezvousAddress(host, 4711, "job", "secret")

    info = address.init_info()

    assert set(info) == {"address", "job", "token"}
    assert RendezvousAddress.from_init_info({**info, "replica": 1}) == address


def test_token_stays_out_of_logs() -> None:
    address = RendezvousAddress("127.0.0.1", 4711, "job", "secret")

    assert "secret" not in repr(address) + str(address)
    with pytest.raises(RendezvousError) as caught:
        RendezvousAddress("127.0.0.1", 0, "job", "secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, "lacks address, job, token"),
        ({"address": "h:1", "job": "j"}, "lacks token"),
        ({"address": "h", "job": "j", "token": "t"}, "'host:port'"),
        ({"address": "h:", "job": "j", "token": "t"}, "'host:port'"),
        ({"address": "h:x", "job": "j", "token": "t"}, "'host:port'"),
        ({"address": 5, "job": "j", "token": "t"}, "'host:port'"),
        ({"address": "h:0", "job": "j", "token": "t"}, "1..65535"),
        ({"address": "h:65536", "job": "j", "token": "t"}, "1..65535"),
        ({"address": "h:1", "job": "", "token": "t"}, "non-empty job"),
        ({"address": "h:1", "job": "j", "token": ""}, "non-empty token"),
        ({"address": "h:1", "job": 1, "token": "t"}, "non-empty job"),
    ],
)
def test_init_info_that_is_no_address(info: dict[str, Any], said: str) -> None:
    with pytest.raises(RendezvousError, match=said):
        RendezvousAddress.from_init_info(info)


def test_settings_come_back() -> None:
    settings = JobSettings(8, 2, 3, 1 << 20, 0, 2.5)

    assert JobSettings.from_json(settings.to_json()) == settings
    assert JobSettings.from_json(JobSettings(8).to_json()) == JobSettings(8)


@pytest.mark.parametrize(
    ("given", "kind", "expected"),
    [
        (None, "cpu", 64 << 20),
        (None, "cuda", 1 << 30),
        (None, "xpu", 64 << 20),
        (100, "cuda", 100),
    ],
)
def test_the_cap_of_a_chunk_suits_the_device_unless_it_is_given(
    given: int | None, kind: str, expected: int
) -> None:
    settings = JobSettings(8, 2, 3, given, 0, 2.5)

    assert settings.for_device(kind) == JobSettings(8, 2, 3, expected, 0, 2.5)
    assert settings.for_device(kind).chunk_bytes == expected
    assert settings.chunk_bytes == (given or 64 << 20)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_producers": 0}, "num_producers must be at least 1"),
        ({"num_producers": 1, "num_slots": True}, "num_slots must be an integer"),
        ({"num_producers": 1, "lookahead": -1}, "lookahead must be at least 0"),
        ({"num_producers": 1, "max_chunk_bytes": 1.5}, "max_chunk_bytes must be an integer"),
        ({"num_producers": 1, "lease_seconds": 0}, "lease_seconds must be positive"),
        ({"num_producers": 1, "lease_seconds": float("nan")}, "lease_seconds must be positive"),
        ({"num_producers": 1, "lease_seconds": "15"}, "lease_seconds must be a number"),
        ({"num_producers": 1, "slots": 2}, "slots"),
        ({}, "num_producers"),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RendezvousError, match=said):
        JobSettings.from_json(fields)
