"""Recording and replaying as vLLM's own ``sharded_rdt`` does, with the bytes at hand.

Its two steps are those of the engine's class, which is made without Ray. What it does with a record
is restated here in plain torch: that part of the class needs a GPU.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import sharded_rdt_engine
from vllm.distributed.weight_transfer.base import layerwise_groups
from vllm.distributed.weight_transfer.sharded_rdt_common import RdtRouter
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _copy_and_restore_kernel_tensors,
    _place_kernel_tensors,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from census.damage import Damage, damaged
from census.models import Models, Weights
from census.outcome import RefusedError
from census.reasons import crash_reason

__all__ = ["StockSync"]


class StockSync:
    """A sync of a model that holds ``old``: recorded, planned, and ready to `run`.

    Raises:
        RefusedError: recording or planning raises, whatever it is.
    """

    bytes_pulled = bytes_landed = 0  # not counted
    unread: frozenset[str] = frozenset()  # not asked
    unproven = ""  # it refuses none

    def __init__(self, models: Models, old: Weights) -> None:
        self._models = models
        self._model = models.loaded(old)
        groups = layerwise_groups(list(old))
        names = [name for group in groups for name in group]
        sizes = [len(group) for group in groups]
        engine_class: Any = sharded_rdt_engine.ShardedRDTWeightTransferEngine
        engine = engine_class.__new__(engine_class)
        engine.model = self._model
        engine.device = torch.device("cpu")
        engine._name_to_plan, engine._name_meta, engine._live_names = {}, {}, set()
        engine._router = RdtRouter(1, 1, names=names, group_lens=sizes, workers_per_replica=1)
        info = sharded_rdt_engine.ShardedRDTWeightTransferInitInfo(
            trainer_actor_names=["trainer"],
            names=names,
            dtype_names=[str(old[name].dtype).removeprefix("torch.") for name in names],
            shapes=[list(old[name].shape) for name in names],
            group_lens=sizes,
        )
        try:
            engine._bake(info)
            engine._build_call_plan(names, sizes)
        except Exception as error:
            raise RefusedError(crash_reason(error)) from error
        modules = {id(records): records for records in engine._name_to_plan.values()}
        self._records = [record for records in modules.values() for record in records]

    def check_supported(self, *, is_quantised: bool) -> None:
        """It checks nothing besides."""

    def run(self, weights: Weights, damage: Damage | None) -> nn.Module:
        """The model once ``weights`` are in it, not post-processed; once."""
        with self._models.context(), set_current_vllm_config(self._models.vllm_config):
            with torch.device("cpu"):
                initialize_layerwise_reload(self._model)
                self._scatter(weights, damage)
            self._put_back()
        return self._model

    def _scatter(self, weights: Weights, damage: Damage | None) -> None:
        opened: dict[int, nn.Module] = {}
        values: dict[str, torch.Tensor] = {}
        for number, record in enumerate(self._records):
            if id(record.layer) not in opened:
                opened[id(record.layer)] = record.layer
                materialize_layer(record.layer, LAYERWISE_INFO[record.layer])
            key = repr(record.src)
            if key not in values:  # one packed slice a key, shaped by the first that uses it
                values[key] = _read(weights, record).contiguous().reshape(record.shape)
            value = damaged(values[key], damage, number)
            if value is not None:
                param = getattr(record.layer, record.param_name)
                into = param.data.as_strided(record.shape, record.stride, record.offset)
                into.copy_(value)
        for layer in opened.values():
            info = LAYERWISE_INFO[layer]
            if info.kernel_tensors is not None:
                _copy_and_restore_kernel_tensors(layer, info)
            info.reset()

    def _put_back(self) -> None:
        """The tensors of the modules that nothing was written to."""
        for layer in self._model.modules():
            info = LAYERWISE_INFO.get(layer)
            if info is not None and info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()


def _read(weights: Weights, record: Any) -> torch.Tensor:
    name, operations = record.src
    value = weights[name]
    for operation, args, kwargs in operations:
        value = getattr(value, operation)(*args, **dict(kwargs))
    return value
