"""Which modules are live: toys that post-process in every way, and vLLM's own layers."""

import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rdt_vllm._vllm import VllmConfig
from rdt_vllm.probe import Probe
from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.fresh_model import FreshModel
from rdt_vllm.testing.install_worker import structure
from rdt_vllm.testing.single_worker import single_worker, worker_config
from rdt_vllm.testing.tiny_models import TINY_QWEN3, TINY_QWEN3_MOE, TinyModel
from rdt_vllm.testing.unpacked import keep_weights_unpacked

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return worker_config(write_checkpoint(TINY_QWEN3.build(0), tmp_path))


def rebind(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.data.clone(), requires_grad=False)


def stay(layer: Any) -> None:
    layer.weight.data.copy_(layer.weight.data.clone())


def transpose(layer: Any) -> None:
    layer.weight.data = layer.weight.data.t().contiguous()


def derive(layer: Any) -> None:
    layer.summed = layer.weight.sum(0)


def hide(layer: Any) -> None:
    packed = layer.weight.clone()
    layer.run = lambda x: x @ packed


def clamp(layer: Any) -> None:
    layer.weight.data.clamp_(-0.5, 0.5)


def shift_bias(layer: Any) -> None:
    layer.bias.data.add_(layer.weight.data[:, 0])


def touch_another(layer: Any) -> None:
    layer.others[0].weight.data.copy_(layer.weight)


def rebind_another(layer: Any) -> None:
    layer.others[0].weight = nn.Parameter(torch.zeros(4, 4))


class Backend(Enum):
    FAST = "fast"
    SLOW = "slow"


UNSEEN: list[Any] = []  # no attribute of a layer leads here


def rebind_unseen(layer: Any) -> None:
    UNSEEN[0].weight = nn.Parameter(UNSEEN[0].weight.data.clone())


def fail(layer: Any) -> None:
    layer.weight.data.zero_()
    layer.others[0].weight.data.zero_()
    layer.flag = 2
    raise ValueError("no kernel")


def model_of(process: Callable[[Any], None]) -> Any:
    """Two layers that see each other, one of them post-processed by ``process``, once before."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    class Method(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            process(layer)

    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    record_metadata_for_reloading(model)
    model[0].quant_method, model[0].others, model[0].flag = Method(), (model[1],), 1
    model.append(nn.Linear(4, 4).requires_grad_(False))
    UNSEEN[:] = [model[2]]
    if process is not fail:
        process(model[0])
    return model


def values(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize(
    ("process", "obstacle"),
    [
        (rebind, None),
        (stay, None),
        (clamp, "changes weight"),
        (transpose, "changes weight"),
        (derive, "changes summed"),
        (hide, "changes run"),
        (shift_bias, "changes bias"),
        (touch_another, r"changes others.*weight"),
        (rebind_another, "changes the tensors of 1"),
        (rebind_unseen, "changes the tensors of 2"),
        (fail, r"cannot be tried \(ValueError: no kernel\)"),
    ],
)
def test_what_changes_anything_is_not_live_and_is_left_as_found(
    config: VllmConfig, process: Callable[[Any], None], obstacle: str | None
) -> None:
    model = model_of(process)
    before, contents, attributes = structure(model), values(model), dict(vars(model[0]))

    found = Probe(model, config).obstacle("0", model[0])

    if obstacle is None:
        assert found is None
    else:
        assert re.search(obstacle, found or ""), found
    assert structure(model) == before
    assert all(map(torch.equal, values(model), contents))
    assert vars(model[0]).keys() == attributes.keys()
    assert all(vars(model[0])[name] is value for name, value in attributes.items())
    assert Probe(model, config).obstacle("1", model[1]) is None  # nothing processes it


def test_another_form_needs_no_trial(config: VllmConfig) -> None:
    model = model_of(stay)
    model[0].weight = nn.Parameter(torch.zeros(4, 4).t().contiguous().t(), requires_grad=False)
    calls: list[Any] = []
    model[0].quant_method.process_weights_after_loading = calls.append

    assert "another form" in str(Probe(model, config).obstacle("0", model[0]))

    model[0].weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    model[0].packed = nn.Parameter(torch.zeros(4), requires_grad=False)
    assert "packed" in str(Probe(model, config).obstacle("0", model[0]))
    assert not calls


def test_equal_modules_are_tried_once_and_those_with_other_flags_again(config: VllmConfig) -> None:
    calls: list[Any] = []
    model = model_of(calls.append)
    calls.clear()
    probe = Probe(model, config)

    assert probe.obstacle("0", model[0]) is None
    assert probe.obstacle("0", model[0]) is None
    assert len(calls) == 2  # two fillings

    for tries, flag in ((2, True), (3, False), (4, Backend.SLOW), (5, Backend.FAST)):
        model[0].skips = flag
        assert probe.obstacle("0", model[0]) is None
        assert len(calls) == 2 * tries
    model[0].quant_method.backend = Backend.SLOW
    assert probe.obstacle("0", model[0]) is None
    assert len(calls) == 12


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("tiny", [TINY_QWEN3, TINY_QWEN3_MOE], ids=lambda tiny: tiny.name)
def test_vllms_layers(
    tiny: TinyModel, packs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU packs linear layers, heads and experts; a GPU does not, and nor does the other case."""
    if not packs:
        keep_weights_unpacked(monkeypatch.setattr)
    folder = write_checkpoint(tiny.build(1), tmp_path / "1")
    with single_worker(folder) as config:
        fresh = FreshModel(config, CPU, str(folder))
        fresh.post_process()
        before, contents = structure(fresh.model), values(fresh.model)
        probe = Probe(fresh.model, config)

        obstacles = {
            path: probe.obstacle(path, module)
            for path, module in fresh.model.named_modules()
            if module._parameters
        }

        dead = {path for path, obstacle in obstacles.items() if obstacle is not None}
        assert dead == ({path for path in obstacles if "norm" not in path} if packs else set())
        assert structure(fresh.model) == before
        assert all(map(torch.equal, values(fresh.model), contents))
