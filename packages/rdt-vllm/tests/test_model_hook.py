"""A model's own post-processing: when it may run again, and that it does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rdt_vllm.errors import InstallError
from rdt_vllm.model_hook import run_model_hook, unrepeatable_hook
from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.fresh_model import FreshModel
from rdt_vllm.testing.install_worker import InstallWorker
from rdt_vllm.testing.single_worker import single_worker
from rdt_vllm.testing.tiny_models import TINY_QWEN3


class Plain(nn.Module):
    pass


class Empty(nn.Module):
    def process_weights_after_loading(self) -> None:
        # Nothing yet.
        pass


class Model(nn.Module):
    model: Any
    language_model: Any

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = self.language_model = model or Plain()


class Derives(Model):
    def process_weights_after_loading(self) -> None:
        self.model.finalize_mega_moe_weights()
        self.model.finalize_mhc_broadcast_weights()


class PassesOn(Model):
    def process_weights_after_loading(self) -> None:
        self.language_model.process_weights_after_loading()


class Guarded(Model):
    def process_weights_after_loading(self) -> None:
        if getattr(self, "done", False):
            return
        self.model.finalize_mega_moe_weights()


class Replaces(Model):
    def process_weights_after_loading(self) -> None:
        self.model = None


class MegaMoe(nn.Module):
    def __init__(self, use: bool) -> None:
        super().__init__()
        self.use_mega_moe = self.use_native_mega_moe = use


@pytest.mark.parametrize(
    "model", [Plain(), Empty(), Derives(), Derives(MegaMoe(False)), PassesOn(Empty())]
)
def test_hooks_that_may_run_again(model: nn.Module) -> None:
    assert unrepeatable_hook(model) is None


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Guarded(), r"Guarded\.process_weights_after_loading in .*test_model_hook:\d+, by its"),
        (Replaces(), r"Replaces\..*STORE_ATTR of model"),
        (Derives(MegaMoe(True)), r"Derives\..*MegaMoE in model"),
        (PassesOn(Guarded()), r"Guarded\..*getattr"),
        (PassesOn(PassesOn(Replaces())), r"Replaces\."),
    ],
)
def test_hooks_that_may_not(model: nn.Module, reason: str) -> None:
    found = unrepeatable_hook(model)
    assert found is not None
    assert re.search(reason, found), found


def test_a_hook_of_another_kind_may_not() -> None:
    model = Plain()
    model.process_weights_after_loading = print  # type: ignore[assignment]
    assert "no plain function" in str(unrepeatable_hook(model))


@pytest.mark.engine
def test_what_a_hook_derives_is_derived_by_every_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM, Qwen3Model

    def derive(self: Any) -> None:
        value = self.norm.weight.detach() * 2
        if hasattr(self, "derived"):
            self.derived.copy_(value)
        else:
            self.derived = value

    monkeypatch.setattr(Qwen3Model, "finalize_mhc_broadcast_weights", derive, raising=False)
    monkeypatch.setattr(Qwen3Model, "finalize_mega_moe_weights", lambda self: None, raising=False)
    monkeypatch.setattr(
        Qwen3ForCausalLM,
        "process_weights_after_loading",
        Derives.process_weights_after_loading,
        raising=False,
    )
    folders = [write_checkpoint(TINY_QWEN3.build(s), tmp_path / str(s)) for s in range(3)]
    with single_worker(folders[0]) as config:
        worker = InstallWorker(config, folders[0])
        model: Any = worker.model
        assert unrepeatable_hook(model) is None
        where = model.model.derived.data_ptr()
        for folder in folders[1:]:
            worker.sync(folder)
            fresh: Any = FreshModel(config, torch.device("cpu"), str(folder))
            fresh.post_process()
            assert torch.equal(model.model.derived, fresh.model.model.derived)
            assert not torch.equal(model.model.derived, torch.zeros_like(model.model.derived))
            assert model.model.derived.data_ptr() == where
        monkeypatch.setattr(Qwen3Model, "finalize_mega_moe_weights", lambda self: self.nothing)
        with pytest.raises(InstallError, match=r"own post-processing.*nothing"):
            worker.sync(folders[0])
        worker.installer.close(60.0)


def test_a_model_without_a_hook_is_left_alone() -> None:
    run_model_hook(Plain())
