"""Fixtures over `rdt_vllm.testing`, for tests that need several packages."""

from collections.abc import Iterator

import pytest

from rdt_vllm.testing.serving import EngineCache


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCache]:
    """Real vLLMs, shared by the whole session and stopped at its end."""
    cache = EngineCache(tmp_path_factory.mktemp("engines"))
    yield cache
    cache.close()
