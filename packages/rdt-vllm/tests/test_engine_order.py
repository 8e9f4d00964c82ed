"""Calls out of order, before there is a job: refused by what must come first, nothing touched."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rdt_vllm.engine import RdtWeightTransferEngine
from rdt_vllm.errors import LifecycleError

UPDATE = {"session": "0" * 32, "epoch": 1}


@pytest.fixture
def engine() -> RdtWeightTransferEngine:
    """As a worker makes it before any trainer came."""
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(), model_config=SimpleNamespace())
    return RdtWeightTransferEngine(config, config, torch.device("cpu"), torch.nn.Linear(3, 2))


@pytest.mark.parametrize("call", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_before_init_every_call_asks_for_it(engine: RdtWeightTransferEngine, call: str) -> None:
    weight = engine.model.get_parameter("weight")
    before = weight.clone()
    arguments = [UPDATE] if call == "update_weights" else []
    with pytest.raises(LifecycleError, match=r"init_weight_transfer_engine has not.*call it first"):
        getattr(engine, call)(*arguments)
    assert engine.model.get_parameter("weight") is weight
    assert torch.equal(weight, before)
    assert not engine.torn
    engine.drain_pending()  # nothing is queued
    engine.shutdown()  # nothing is attached
