import threading
from datetime import timedelta

import pytest
import torch

from rdt_trainer.errors import RankFailedError
from rdt_trainer.ranks import gather_from_ranks, group_size


def test_without_a_group_there_is_no_size():
    assert group_size() is None


def test_every_rank_learns_what_every_rank_made_or_why_one_could_not(tmp_path):
    import torch.multiprocessing as mp

    mp.spawn(_gather_as_rank, args=(f"file://{tmp_path}/store",), nprocs=2)


class Unpicklable(Exception):
    def __init__(self, lock: object) -> None:
        super().__init__("cannot travel")
        self.lock = lock


def _gather_as_rank(rank: int, init_method: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )

    def fail_on_rank_1() -> int:
        if rank == 1:
            raise Unpicklable(threading.Lock())
        return rank

    try:
        assert group_size() == 2
        assert gather_from_ranks(lambda: f"from {rank}") == ["from 0", "from 1"]
        expected = Unpicklable if rank == 1 else RankFailedError
        with pytest.raises(expected, match="cannot travel") as caught:
            gather_from_ranks(fail_on_rank_1)
        if isinstance(caught.value, RankFailedError):
            assert (caught.value.rank, caught.value.reason) == (1, "Unpicklable: cannot travel")
        assert gather_from_ranks(lambda: rank) == [0, 1]  # nobody is a collective behind
    finally:
        torch.distributed.destroy_process_group()
