import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import ConsumerId
from rdt_vllm.errors import InitInfoError
from rdt_vllm.identity import worker_identity


@given(
    data_parallel_size=st.integers(1, 6),
    world_size=st.integers(1, 6),
    num_replicas=st.integers(1, 3),
)
def test_a_fleet_has_every_identity_once(
    data_parallel_size: int, world_size: int, num_replicas: int
) -> None:
    identities = [
        worker_identity(
            data_parallel_index=index,
            data_parallel_size=data_parallel_size,
            world_size=world_size,
            rank=rank,
            replica=replica,
            num_replicas=num_replicas,
        )
        for replica in range(num_replicas)
        for index in range(data_parallel_size)
        for rank in range(world_size)
    ]

    num_workers = data_parallel_size * world_size
    expected = [
        (ConsumerId(replica, worker), num_workers)
        for replica in range(num_replicas)
        for worker in range(num_workers)
    ]
    assert sorted(identities) == expected


def test_a_dense_data_parallel_rank_needs_to_be_told_the_size() -> None:
    rank = {"data_parallel_index": 1, "data_parallel_size": 1, "world_size": 2, "rank": 1}
    place = {"replica": 0, "num_replicas": 1}

    with pytest.raises(InitInfoError, match=r"worker 3 .* of 2 workers: give num_workers.* client"):
        worker_identity(**rank, **place)

    assert worker_identity(**rank, **place, num_workers=4) == (ConsumerId(0, 3), 4)


@pytest.mark.parametrize(
    ("replica", "num_replicas", "num_workers"), [(-1, 1, 0), (1, 1, 0), (0, 0, 0), (0, 1, -1)]
)
def test_impossible_places_are_refused(replica: int, num_replicas: int, num_workers: int) -> None:
    with pytest.raises(InitInfoError):
        worker_identity(
            data_parallel_index=0,
            data_parallel_size=1,
            world_size=1,
            rank=0,
            replica=replica,
            num_replicas=num_replicas,
            num_workers=num_workers,
        )
