from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import Manifest, Ownership, ParamMeta, Router, RoutingError


def router(num_owners: int, num_workers: int, first: int = 0, num_groups: int = 12) -> Router:
    owners = tuple(range(first, first + num_owners))
    params = [ParamMeta(f"l.{i}.w", "int8", (1,), owners) for i in range(num_groups + 1)]
    return Router(Ownership.of(Manifest.build(params)), num_workers)


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


@given(st.integers(1, 4), st.lists(st.integers(0, 2), min_size=1, max_size=24))
def test_every_owner_of_every_set_serves_its_share_of_the_groups(num_workers, kinds) -> None:
    held = [(0, 1, 2, 3), (4, 5, 6, 7, 8, 9), (10, 11)]
    params = [ParamMeta(f"l.{i}.w", "int8", (1,), held[kind]) for i, kind in enumerate(kinds)]
    ownership = Ownership.of(Manifest.build(params))
    routes = Router(ownership, num_workers)
    for kind, owners in enumerate(held):
        groups = [group for group, each in enumerate(kinds) if each == kind]
        if not groups:
            continue
        number = ownership.owner_sets.index(owners)
        for worker in range(num_workers):
            served = Counter(routes.producer(number, worker, group) for group in groups)
            block = max(len(owners) * (worker + 1) // num_workers, 1)
            block -= len(owners) * worker // num_workers
            counts = [*served.values(), *[0] * (max(block, 1) - len(served))]
            assert max(counts) - min(counts) <= 1


def test_layers_that_alternate_between_owner_sets_use_all_of_their_owners() -> None:
    held = [(0, 1), (2, 3)]
    params = [ParamMeta(f"l.{i}.w", "int8", (1,), held[i % 2]) for i in range(8)]
    routes = Router(Ownership.of(Manifest.build(params)), num_workers=1)
    assert [routes.producer(i % 2, 0, i) for i in range(8)] == [0, 2, 1, 3, 0, 2, 1, 3]


def test_replicas_of_one_size_resolve_alike_and_others_carve_their_own_blocks() -> None:
    ownership = router(4, 2).ownership
    assert [Router(ownership, 4).producer(0, worker, 1) for worker in range(4)] == [0, 1, 2, 3]
    assert [Router(ownership, 2).producer(0, worker, 1) for worker in range(2)] == [1, 3]
    assert Router(ownership, 1).producer(0, 0, 1) == 1


@pytest.mark.parametrize(
    ("owner_set", "worker", "group", "message"),
    [
        (0, 2, 0, "below 2, found worker 2"),
        (0, -1, 0, "found worker -1"),
        (1, 0, 0, "1 owner sets .* found owner set 1 and group 0"),
        (0, 0, 13, "found owner set 0 and group 13"),
    ],
)
def test_refuses_what_does_not_exist(owner_set, worker, group, message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        router(2, 2).producer(owner_set, worker, group)


def test_refuses_a_deployment_without_workers() -> None:
    with pytest.raises(RoutingError, match="at least one worker"):
        router(1, 0)
