import torch
from torch import nn

from rdt_bake import find_tensor
from rdt_bake.places import module_paths, places


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.zeros(1)
        self.pair = (torch.zeros(1), "text")
        self.deep = [[torch.zeros(1)]]
        self.w = nn.Parameter(torch.zeros(2))
        self.register_buffer("b", torch.zeros(3))
        self.register_buffer("none", None)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keyed = {"x y": torch.zeros(1), 2: torch.zeros(1)}
        self.left = Leaf()
        self.right = self.left
        self.last = nn.Parameter(torch.zeros(1))


def test_parameters_come_first_and_shared_modules_once_a_path() -> None:
    found = [(place.module, place.param, place.kind) for place in places(Root())]
    assert found == [
        ("", "last", "parameter"),
        ("left", "w", "parameter"),
        ("right", "w", "parameter"),
        ("left", "b", "buffer"),
        ("right", "b", "buffer"),
        ("", "keyed['x y']", "attribute"),
        ("", "keyed[2]", "attribute"),
        ("left", "plain", "attribute"),
        ("left", "pair[0]", "attribute"),
        ("right", "plain", "attribute"),
        ("right", "pair[0]", "attribute"),
    ]


def test_every_place_is_found_again() -> None:
    model = Root()
    for place in places(model):
        assert find_tensor(model, place.module, place.param) is place.tensor


def test_modules_that_hold_each_other_end() -> None:
    parent, child = nn.Module(), nn.Module()
    parent.child = child
    child.parent = parent
    assert [path for path, _ in module_paths(parent)] == ["", "child"]
