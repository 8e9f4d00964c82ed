"""Fixtures over `rdt_vllm.testing`, for tests that need several packages."""

from collections.abc import Iterator

import pytest

from rdt_vllm.testing.leftovers import Footprint
from rdt_vllm.testing.serving import EngineCache
from tests.http_servers import Servers, serve_two


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Set up first and ended last: around every engine, cluster, server and trainer of a session.

    What it finds is an error of the session's last test.
    """
    before = Footprint.take()
    yield
    assert before.left() == []


@pytest.fixture(scope="session")
def engines(
    tmp_path_factory: pytest.TempPathFactory, nothing_is_left: None
) -> Iterator[EngineCache]:
    """Real vLLMs, shared by the whole session and stopped at its end."""
    cache = EngineCache(tmp_path_factory.mktemp("engines"))
    yield cache
    cache.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory, nothing_is_left: None) -> Iterator[Servers]:
    """Two stock servers over HTTP, shared by the whole session and stopped at its end."""
    with serve_two(tmp_path_factory.mktemp("servers")) as servers:
        yield servers
