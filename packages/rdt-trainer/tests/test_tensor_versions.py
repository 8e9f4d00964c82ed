import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rdt_trainer.errors import SourceError
from rdt_trainer.tensor_versions import TensorVersions


def noted(tensor: torch.Tensor, keep: bool = False) -> TensorVersions:
    versions = TensorVersions(3)
    versions.note("w", tensor, keep=keep)
    versions.check()
    return versions


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(2, 4)[1],
        torch.nn.Parameter(torch.zeros(4)),
        torch.nn.Parameter(torch.zeros(4)).detach(),
    ],
)
def test_a_change_in_place_is_seen_through_every_alias(tensor, inference_mode, keep):
    with torch.inference_mode(inference_mode):
        versions = noted(tensor, keep)
    with torch.no_grad():
        tensor.detach()[:1].add_(1)
    with pytest.raises(SourceError, match=r"^rank 3: w changed in place.*send_weights returns"):
        versions.check()
    versions.check(start=1)


def test_an_optimizer_step_is_seen():
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    versions = noted(parameter)
    torch.optim.AdamW([parameter]).step()
    with pytest.raises(SourceError, match="w changed"):
        versions.check()


def test_noting_changes_nothing_and_keeps_no_memory():
    tensor = torch.arange(4)
    memory = StorageWeakRef(tensor.untyped_storage())
    versions = noted(tensor)
    assert tensor.tolist() == [0, 1, 2, 3]
    assert tensor._version == 0
    del tensor
    assert memory.expired()
    versions.check()


def test_memory_that_another_tensor_takes_over_is_no_change():
    base = torch.zeros(4)
    versions = noted(base.data)
    versions.note("tied", base)
    versions.check()


def test_inference_tensors_are_not_watched():
    with torch.inference_mode():
        tensor = torch.zeros(4)
        versions = noted(tensor)
        tensor.add_(1)
    assert len(versions) == 0
    versions.check()


def test_many_names_are_counted():
    versions, tensor = TensorVersions(0), torch.zeros(4)
    for name in range(9):
        versions.note(f"w{name}", tensor)
    tensor.add_(1)
    with pytest.raises(SourceError, match="w0, w1, w2, w3 and 5 more changed"):
        versions.check()


@pytest.mark.parametrize("changed", [[], ["b"], ["a", "c"]])
def test_standing_tensors_are_noted_at_once(changed):
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in "abc"}
    with torch.inference_mode():
        unwatched = torch.zeros(2)
    versions = TensorVersions(3)
    versions.note_standing(
        {name: each.detach() for name, each in parameters.items()} | {"i": unwatched}
    )
    with torch.no_grad():
        for name in changed:
            parameters[name].add_(1)
    with torch.inference_mode():
        unwatched.add_(1)
    versions.check()
    assert len(versions) == 0
    if not changed:
        versions.check_standing()
        return
    with pytest.raises(SourceError, match=f"^rank 3: {', '.join(changed)} changed in place"):
        versions.check_standing()
