"""Attention processed again: into the same memory, and only where weights matter."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rdt_vllm._vllm import VllmConfig
from rdt_vllm.deferred import DeferredModules
from rdt_vllm.errors import InstallError
from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.single_worker import worker_config
from rdt_vllm.testing.tiny_models import TINY_QWEN3

pytestmark = pytest.mark.engine


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return worker_config(write_checkpoint(TINY_QWEN3.build(0), tmp_path))


def reset_scales(attention: Any) -> None:
    attention.scale.fill_(1.0)
    attention.scale_host = torch.tensor(1.0)
    attention.scale_float = 1.0


def derive(attention: Any) -> None:
    """Makes everything anew, wherever it keeps it."""
    weight = attention.source.weight
    attention.parameter = nn.Parameter(weight.data * 2, requires_grad=False)
    attention.buffer = weight.data.t() + 1
    attention.attribute = weight.data.sum(0)
    attention.impl.packed = weight.data.clone()


def alias(attention: Any) -> None:
    attention.parameter = nn.Parameter(attention.source.weight.data.t(), requires_grad=False)


def model_of(process: Callable[[Any], None]) -> Any:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Attention(nn.Module, AttentionLayerBase):
        def __init__(self, source: nn.Linear) -> None:
            super().__init__()
            self.source = source
            self.register_buffer("scale", torch.tensor(0.0))
            self.impl = SimpleNamespace()
            self.process = process

        def get_attn_backend(self) -> Any: ...
        def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            assert act_dtype == torch.bfloat16
            self.process(self)

    model: Any = nn.Sequential(nn.Linear(3, 2, bias=False).requires_grad_(False))
    model.append(Attention(model[0]))
    process(model[1])
    return model


def tensors(attention: Any) -> dict[str, torch.Tensor]:
    held = {**attention._parameters, **attention._buffers, **vars(attention)}
    held |= vars(attention.impl)
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def test_what_only_resets_constants_is_left_out_unless_a_sync_writes_it(
    config: VllmConfig,
) -> None:
    model = model_of(reset_scales)
    assert DeferredModules(model, (), config).paths == ()
    assert DeferredModules(model, ("0",), config).paths == ()
    assert DeferredModules(model, ("1",), config).paths == ("1",)


@pytest.mark.parametrize("process", [derive, alias])
def test_what_is_derived_anew_stays_where_it_was(
    config: VllmConfig, process: Callable[[Any], None]
) -> None:
    model = model_of(process)
    before = tensors(model[1])
    where = {name: tensor.data_ptr() for name, tensor in before.items()}
    deferred = DeferredModules(model, (), config)
    assert deferred.paths == ("1",)

    for value in (1.0, 2.0):
        model[0].weight.data.fill_(value).view(-1)[0] = 7
        deferred.process()

        after = tensors(model[1])
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)
        assert {name: tensor.data_ptr() for name, tensor in after.items()} == where
        fresh = model_of(process)
        fresh[0].weight.data.copy_(model[0].weight.data)
        process(fresh[1])
        assert all(torch.equal(after[k], value) for k, value in tensors(fresh[1]).items())


def test_what_cannot_be_processed_again_is_named(config: VllmConfig) -> None:
    model = model_of(derive)
    deferred = DeferredModules(model, (), config)

    model[1].process = lambda attention: vars(attention).update(attribute=torch.zeros(9))
    with pytest.raises(InstallError, match=r"1\.attribute: expected \(3,\).*found \(9,\)"):
        deferred.process()

    model[1].process = lambda attention: 1 / 0
    with pytest.raises(InstallError, match="1: post-processing failed: division"):
        deferred.process()
    assert DeferredModules(model, (), config).paths == ("1",)  # as it does now
