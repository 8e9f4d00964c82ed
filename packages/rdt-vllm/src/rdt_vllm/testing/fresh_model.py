"""A second model inside a worker, loaded by vLLM itself: what the first one is held against."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rdt_vllm._vllm import VllmConfig, active_config, is_deferred
from rdt_vllm.testing import _vllm
from rdt_vllm.testing.bits import first_difference

__all__ = ["FreshModel"]


class FreshModel:
    """A model of the worker's configuration that has loaded ``checkpoint`` with its own loaders.

    It is built beside the live one, which it leaves alone: it has a forward context of its own.
    It takes as much memory again as the live model. Building it raises what vLLM's loader raises
    when the folder lacks a weight.

    Attributes:
        model: before `post_process`, parameters as the loaders left them.
        layers: the layers that a forward finds by name (attention, experts).
        left_alone: parameters of attention, as (module, name), that loading has not changed: scales
            that a checkpoint may have.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, checkpoint: str) -> None:
        self._config = copy.copy(vllm_config)
        self._config.compilation_config = copy.copy(vllm_config.compilation_config)
        self._config.compilation_config.static_forward_context = {}
        self._config.compilation_config.static_all_moe_layers = []
        self._device = device
        source = copy.copy(vllm_config.model_config)
        source.model, source.revision = checkpoint, None
        # Any: the tracing decorator hides the signatures of these two
        initialize_model: Any = _vllm.initialize_model
        loader: Any = _vllm.DefaultModelLoader(
            _vllm.LoadConfig(load_format="safetensors", use_tqdm_on_load=False)
        )
        with torch.no_grad(), active_config(self._config), self._dtype():
            with device:
                self.model: nn.Module = initialize_model(self._config)
            built = {place: param.clone() for place, param in _params_of_attention(self.model)}
            loader.load_weights(self.model, source)
        self.left_alone = frozenset(
            place
            for place, param in _params_of_attention(self.model)
            if first_difference(param, built[place]) is None
        )

    @property
    def layers(self) -> dict[str, Any]:
        return self._config.compilation_config.static_forward_context

    def post_process(self) -> None:
        """Bring all of it to kernel form, as vLLM does after a first load."""
        with torch.no_grad(), active_config(self._config), self._dtype():
            _vllm.process_weights_after_loading(self.model, self._config.model_config, self._device)
        self.model.eval()

    def _dtype(self) -> Any:
        dtype: Any = self._config.model_config.dtype  # vLLM has resolved names by now
        return _vllm.set_default_torch_dtype(dtype)


def _params_of_attention(model: nn.Module) -> Iterator[tuple[tuple[str, str], nn.Parameter]]:
    for path, module in model.named_modules():
        if is_deferred(module):
            for name, param in module.named_parameters(recurse=False):
                yield (path, name), param
