import pytest
import torch

from rdt_trainer import rank_meshes as module
from rdt_trainer.errors import SourceError
from rdt_trainer.rank_meshes import RankMesh, rank_meshes


class Mesh:
    def __init__(self, ranks: list) -> None:
        self.mesh = torch.tensor(ranks)


class Sharded:
    """The one attribute of a ``DTensor`` that counts here."""

    def __init__(self, ranks: list) -> None:
        self.device_mesh = Mesh(ranks)


@pytest.fixture
def others(monkeypatch) -> list[dict[str, RankMesh]]:
    """What ranks 1 to 3 of four say; rank 0 is here."""
    found: list[dict[str, RankMesh]] = []
    monkeypatch.setattr(module, "group_size", lambda: 4)
    monkeypatch.setattr(module, "gather_from_ranks", lambda make: [make(), *found])
    return found


def test_a_mesh_of_all_ranks_needs_no_exchange(monkeypatch) -> None:
    monkeypatch.setattr(module, "group_size", lambda: 4)
    tensors = {"w": Sharded([[0, 1], [2, 3]]), "plain": torch.ones(1)}
    assert rank_meshes(tensors) == {"w": RankMesh((0, 1, 2, 3), (2, 2))}


def test_rows_of_one_mesh_are_put_together(others) -> None:
    row, other = RankMesh((0, 2), (2,)), RankMesh((1, 3), (2,))
    others += [{"w": other}, {"w": row}, {"w": other}]
    assert rank_meshes({"w": Sharded([0, 2])}) == {"w": RankMesh((0, 2, 1, 3), (2, 2))}


def test_a_name_that_other_ranks_lack_is_on_its_own_mesh(others) -> None:
    others += [{"w": RankMesh((0, 1), (2,))}, {"later": RankMesh((2, 3), (2,))}, {}]
    assert rank_meshes({"w": Sharded([0, 1])}) == {"w": RankMesh((0, 1), (2,))}


@pytest.mark.parametrize("other", [RankMesh((1, 2), (2,)), RankMesh((1, 2, 3), (3,))])
def test_meshes_that_do_not_fit_are_refused_by_name(others, other) -> None:
    others += [{"w": other}, {}, {}]
    with pytest.raises(SourceError, match=r"w is on the meshes \[\(0, 1\), \(1, 2.*equal parts"):
        rank_meshes({"w": Sharded([0, 1])})


@pytest.mark.parametrize("ranks", [[1, 0], [[0, 1], [3, 2]], [[2, 3], [0, 1]]])
def test_ranks_that_do_not_ascend_are_refused(monkeypatch, ranks) -> None:
    monkeypatch.setattr(module, "group_size", lambda: torch.tensor(ranks).numel())
    with pytest.raises(SourceError, match=r"w is on the mesh .* expected ranks that ascend"):
        rank_meshes({"w": Sharded(ranks)})
