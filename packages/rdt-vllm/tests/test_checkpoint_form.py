"""The form that is made anew is the one that vLLM's own reload makes, tensor by tensor."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rdt_vllm import _vllm
from rdt_vllm.checkpoint_form import CheckpointForm
from rdt_vllm.module_tensors import ModuleTensors, own_tensors
from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.fresh_model import FreshModel
from rdt_vllm.testing.install_worker import structure
from rdt_vllm.testing.single_worker import single_worker
from rdt_vllm.testing.tiny_models import TINY_FALCON_H1, TINY_QWEN2, TINY_QWEN3_MOE, TinyModel

pytestmark = pytest.mark.engine


@pytest.fixture(params=[TINY_QWEN2, TINY_QWEN3_MOE, TINY_FALCON_H1], ids=lambda tiny: tiny.name)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[nn.Module]:
    tiny: TinyModel = request.param
    folder = write_checkpoint(tiny.build(0), tmp_path / "served")
    with single_worker(folder) as config:
        fresh = FreshModel(config, torch.device("cpu"), str(folder))
        fresh.post_process()
        yield fresh.model


def described(module: nn.Module, kernels: dict[str, torch.Tensor]) -> Any:
    """All that post-processing can see of a module's tensors, but for what they hold."""

    def tensor(name: str, each: torch.Tensor | None) -> Any:
        if each is None or each is kernels.get(name):
            return name, each is None
        layout = (each.shape, each.stride(), each.dtype, each.device, each.requires_grad)
        return name, type(each), layout, each.storage_offset(), each.__dict__

    return (
        [tensor(*item) for item in module._parameters.items()],
        [tensor(*item) for item in module._buffers.items()],
        set(module._non_persistent_buffers_set),
        sorted(module.__dict__),
    )


def of_vllm(module: nn.Module) -> Any:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer

    kept = ModuleTensors.of(module, frozenset(_vllm.checkpoint_form(module)))
    kernels = own_tensors(module)
    _vllm.restore_on_meta(module)
    materialize_layer(module, get_layerwise_info(module))
    found = described(module, kernels)
    kept.put_back()
    return found


def test_every_module_gets_what_vllm_would_give_it(model: nn.Module) -> None:
    before, changed = structure(model), 0
    for module in model.modules():
        kernels, expected = own_tensors(module), of_vllm(module)
        form = CheckpointForm(module, ())
        for _ in range(2):
            kept = form.keep(module)
            form.give(kept)
            assert described(module, kernels) == expected
            changed += any(t is not kernels.get(name) for name, t in own_tensors(module).items())
            for tensor in own_tensors(module).values():
                tensor.__dict__["noted"] = True  # by post-processing, say
            kept.put_back()
            for tensor in kernels.values():
                tensor.__dict__.pop("noted", None)
    assert changed
    assert structure(model) == before


def test_what_stays_is_the_kernels_and_the_rest_is_new_each_time(model: nn.Module) -> None:
    module = next(each for each in model.modules() if len(_vllm.checkpoint_form(each)) > 1)
    kernels = own_tensors(module)
    first, *others = [name for name in _vllm.checkpoint_form(module) if name in kernels]
    form = CheckpointForm(module, [first])
    made = []
    for _ in range(2):
        kept = form.keep(module)
        form.give(kept)
        made.append(own_tensors(module))
        kept.put_back()

    assert all(each[first] is kernels[first] for each in made)
    assert others
    for name in others:
        assert len({id(each[name]) for each in (*made, kernels)}) == 3


def test_another_tensor_is_another_module_to_ask_about(model: nn.Module) -> None:
    module = next(each for each in model.modules() if own_tensors(each))
    form = CheckpointForm(module, ())
    assert form.is_of(module)

    module.register_buffer("late", torch.zeros(1), persistent=False)

    assert not form.is_of(module)
    assert CheckpointForm(module, ()).is_of(module)
