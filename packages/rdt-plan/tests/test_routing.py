import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import Manifest, Ownership, ParamMeta, Router, RoutingError


def router(num_owners: int, num_workers: int, first: int = 0) -> Router:
    owners = tuple(range(first, first + num_owners))
    manifest = Manifest.build([ParamMeta("w", "int8", (1,), owners)])
    return Router(Ownership.of(manifest), num_workers)


@pytest.mark.parametrize(
    ("num_owners", "num_workers", "blocks"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (3, 3, [[0], [1], [2]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
        (3, 4, [[0], [0], [1], [2]]),
    ],
)
def test_blocks(num_owners: int, num_workers: int, blocks: list[list[int]]) -> None:
    routes = router(num_owners, num_workers, first=10)
    for worker, block in enumerate(blocks):
        ranks = [routes.producer(0, worker, group) for group in range(len(block))]
        assert ranks == [10 + owner for owner in block]
        assert routes.producer(0, worker, len(block)) == ranks[0]


@given(st.integers(1, 12), st.integers(1, 12))
def test_every_owner_serves_and_the_load_is_even(num_owners: int, num_workers: int) -> None:
    routes = router(num_owners, num_workers)
    workers_of: dict[int, set[int]] = {}
    for worker in range(num_workers):
        for group in range(num_owners):
            workers_of.setdefault(routes.producer(0, worker, group), set()).add(worker)
    assert set(workers_of) == set(range(num_owners))
    if num_owners >= num_workers:
        assert all(len(workers) == 1 for workers in workers_of.values())
    else:
        sizes = [len(workers) for workers in workers_of.values()]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("owner_set", "worker", "message"),
    [
        (0, 2, "below 2, found worker 2"),
        (0, -1, "found worker -1"),
        (1, 0, "1 owner sets, found 1"),
    ],
)
def test_refuses_what_does_not_exist(owner_set: int, worker: int, message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        router(2, 2).producer(owner_set, worker, 0)


def test_refuses_a_deployment_without_workers() -> None:
    with pytest.raises(RoutingError, match="at least one worker"):
        router(1, 0)
