import torch
from torch import nn

from rdt_vllm.ties import find_ties, retie


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.lone = nn.Linear(3, 4)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.alias = self.embed  # a second name of one module


def test_shared_parameters_are_found_and_one_module_under_two_names_is_no_tie() -> None:
    model = Model()

    assert find_ties(model) == (((model.embed, "weight"), (model.head, "weight")),)


def test_two_objects_over_one_memory_are_tied_and_other_layouts_of_it_are_not() -> None:
    model = Model()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    model.lone.weight = nn.Parameter(model.embed.weight.data.view(3, 4).t())

    assert find_ties(model) == (((model.embed, "weight"), (model.head, "weight")),)


def test_tensors_without_memory_are_not_tied() -> None:
    model = Model()
    for module in (model.embed, model.head, model.lone):
        module.weight = nn.Parameter(torch.empty(0))
    assert find_ties(model) == ()

    for module in (model.embed, model.head, model.lone):
        module.weight = nn.Parameter(torch.empty(4, 3, device="meta"))
    assert find_ties(model) == ()


def test_retie_shares_the_first_places_tensor_again() -> None:
    model = Model()
    ties = find_ties(model)
    model.embed.weight = nn.Parameter(torch.zeros(4, 3))
    model.head.weight = nn.Parameter(torch.ones(4, 3))

    retie(ties)

    assert model.head.weight is model.embed.weight
    assert not model.embed.weight.any()


def test_retie_leaves_places_alone_that_are_gone() -> None:
    model = Model()
    ties = find_ties(model)
    del model.head.weight
    retie(ties)
    assert not hasattr(model.head, "weight")

    del model.embed.weight
    model.head.weight = nn.Parameter(torch.ones(4, 3))
    retie(ties)
    assert bool(model.head.weight.all())
