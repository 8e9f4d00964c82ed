"""Everything this package takes from vLLM, and the gate for its version.

What is light enough for every process is imported at the top; the model layers, which bind to a
platform when they are imported, only inside the functions that workers call.
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import vllm
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rdt_vllm.amendments import end_open_updates, keep_answers_in_step, refuse_sleep_in_updates
from rdt_vllm.errors import VllmVersionError
from rdt_vllm.model_hook import unrepeatable_hook
from rdt_vllm.proven_methods import describe, is_proven
from rdt_vllm.refusals import EngineFacts

__all__ = [
    "VllmConfig",
    "WeightTransferConfig",
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "active_config",
    "amend_executor",
    "amend_worker",
    "build_device",
    "check_version",
    "checkpoint_form",
    "checkpoint_weights",
    "dropped_buffers",
    "engine_facts",
    "is_deferred",
    "is_never_loaded",
    "is_never_moved",
    "may_sleep",
    "post_process",
    "post_process_deferred",
    "post_processor",
    "register_engine",
    "restore_on_meta",
]

MIN_VERSION = (0, 29)

# What we build on, as (module, attribute); checked when a worker initialises.
_NEEDED = (
    ("vllm.model_executor.layers.attention", "is_deferred_attention_layer"),
    ("vllm.model_executor.layers.quantization.base_config", "QuantizeMethodBase"),
    ("vllm.model_executor.model_loader.reload.layerwise", "get_layerwise_info"),
    ("vllm.model_executor.model_loader.reload.meta", "SKIP_MODULES"),
    ("vllm.model_executor.model_loader.reload.meta", "SKIP_TENSORS"),
    ("vllm.model_executor.model_loader.reload.meta", "restore_layer_on_meta"),
    ("vllm.v1.worker.gpu_worker", "Worker"),
)

_logger = logging.getLogger("rdt_vllm")


def register_engine(backend: str, module: str, class_name: str) -> None:
    """Register lazily; raises `ValueError` when the backend's name is taken."""
    WeightTransferEngineFactory.register_engine(backend, module, class_name)


def check_version() -> None:
    """Raise `VllmVersionError` unless this vLLM is new enough and has all that we build on."""
    found = tuple(vllm.__version_tuple__[:2])
    if found != (0, 0) and found < MIN_VERSION:  # (0, 0): a development build that cannot tell
        raise VllmVersionError(
            f"vLLM {vllm.__version__} is too old: rdt-vllm needs 0.29 or later; upgrade vLLM"
        )
    for module, attribute in _NEEDED:
        try:
            getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise VllmVersionError(
                f"vLLM {vllm.__version__} has no {module}.{attribute}, which rdt-vllm builds on; "
                "upgrade rdt-vllm, or use a vLLM that it was released for"
            ) from error


def active_config(vllm_config: VllmConfig) -> AbstractContextManager[None]:
    """vLLM's "current config" while the context is open, in *all* threads: it is one global."""
    return set_current_vllm_config(vllm_config)


# ---- layers between checkpoint form and kernel form --------------------------------------------


def checkpoint_form(module: nn.Module) -> dict[str, torch.Tensor]:
    """Meta tensors of the form in which loaders fill ``module``, without those never moved."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES, SKIP_TENSORS

    if type(module).__name__ in SKIP_MODULES:
        return {}
    params, buffers = get_layerwise_info(module).restore_metadata
    both = {**params, **buffers}  # of a placeholder, some versions keep a None
    return {name: t for name, t in both.items() if name not in SKIP_TENSORS and t is not None}


def dropped_buffers(module: nn.Module) -> tuple[str, ...]:
    """The module's non-persistent buffers that `restore_on_meta` takes away, and none puts back."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES, SKIP_TENSORS

    if type(module).__name__ in SKIP_MODULES:
        return ()
    stays = SKIP_TENSORS | checkpoint_form(module).keys()
    return tuple(sorted(module._non_persistent_buffers_set - stays))


def restore_on_meta(module: nn.Module) -> None:
    """Replace the module's own tensors by meta tensors of the checkpoint's form.

    Some, ``bias`` among them, stay what they are: vLLM never moves them.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    restore_layer_on_meta(module, get_layerwise_info(module))
    own: list[Any] = [*module._parameters.values(), *module._buffers.values()]
    for tensor in own:
        loader: Any = getattr(tensor, "weight_loader", None)
        while getattr(loader, "__name__", "") == "online_process_loader":
            loader = tensor.weight_loader = loader.__wrapped__  # vLLM's own reload leaves it there


def build_device(module: nn.Module) -> torch.device:
    """The device that the module's tensors were made on when the model was built."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(module).restore_device


def is_never_moved(name: str) -> bool:
    """Whether `restore_on_meta` leaves tensors of this name what they are."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    return name in SKIP_TENSORS


def is_deferred(module: nn.Module) -> bool:
    """Whether vLLM post-processes this module after all others: attention, which reads them."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return is_deferred_attention_layer(module)


def is_never_loaded(module: nn.Module, name: str) -> bool:
    """Whether vLLM computes this tensor, so that no weight has to cover it."""
    return is_deferred(module) or name.startswith("expert_") or name == "_expert_map"


def post_process(module: nn.Module) -> None:
    """Bring a freshly filled module from checkpoint form to kernel form, as after a first load."""
    quant_method = post_processor(module)
    if quant_method is None:
        return
    # Online methods remember that they ran.
    if "_already_called_process_weights_after_loading" in module.__dict__:
        del module._already_called_process_weights_after_loading
    quant_method.process_weights_after_loading(module)
    experts = _experts(quant_method)
    if experts is not None and _prepares_weights(experts):
        # vLLM calls this hook on the first load only. A CPU's kernel reads weights that it packs.
        experts.process_weights_after_loading(module)


def post_process_deferred(module: nn.Module, vllm_config: VllmConfig) -> None:
    """Run what attention derives from other modules' weights."""
    process: Any = module.process_weights_after_loading
    process(vllm_config.model_config.dtype)


def post_processor(module: nn.Module) -> Any:
    """The quantisation method that post-processes the module; None when nothing does."""
    quant_method = getattr(module, "quant_method", None)
    return quant_method if isinstance(quant_method, _method_classes()[0]) else None


@cache
def _method_classes() -> tuple[type, type]:
    """Of all quantisation methods, and of unquantised mixtures of experts'."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return QuantizeMethodBase, UnquantizedFusedMoEMethod


def _experts(quant_method: Any) -> Any:
    """The experts object of an unquantised mixture-of-experts method whose kernel exists."""
    if not isinstance(quant_method, _method_classes()[1]):
        return None
    return getattr(getattr(quant_method, "moe_kernel", None), "fused_experts", None)


def _prepares_weights(experts: Any) -> bool:
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

    hook = "process_weights_after_loading"
    return getattr(type(experts), hook, None) is not getattr(FusedMoEExperts, hook, None)


def checkpoint_weights(
    vllm_config: VllmConfig, model: nn.Module
) -> Iterator[tuple[str, torch.Tensor]] | None:
    """The weights that the model was first loaded from; None where it was from no checkpoint.

    They are read one by one, lazily where their files allow it. Raises what vLLM's loader raises
    when the files are gone.
    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = get_model_loader(vllm_config.load_config)
    if not isinstance(loader, DefaultModelLoader):
        return None
    return loader.get_all_weights(vllm_config.model_config, model)


# ---- what a configuration asks for -------------------------------------------------------------


def may_sleep(vllm_config: VllmConfig) -> bool:
    """Whether the weights lie in memory that sleeping takes away, and that cannot be registered."""
    return vllm_config.model_config.enable_sleep_mode


def engine_facts(vllm_config: VllmConfig, model: nn.Module) -> EngineFacts:
    """What `check_supported` decides on; `VllmVersionError` where vLLM names it otherwise."""
    try:
        speculative = vllm_config.speculative_config
        offload = vllm_config.offload_config
        return EngineFacts(
            eplb=vllm_config.parallel_config.enable_eplb,
            draft_method=None if speculative is None else speculative.method,
            lora=vllm_config.lora_config is not None,
            offload=offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0,
            retied_embeddings=getattr(
                vllm_config.model_config, "word_embeddings_untied_by_checkpoint", False
            ),
            model_hook=unrepeatable_hook(model),
            device=vllm_config.device_config.device_type,
            unproven=tuple(_unproven(model)),
        )
    except (AttributeError, ImportError) as error:
        # A setting that is gone could be one that we must refuse.
        raise VllmVersionError(
            f"vLLM {vllm.__version__} has other settings than rdt-vllm knows ({error}); upgrade "
            "rdt-vllm, or use a vLLM that it was released for"
        ) from error


def _unproven(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Modules, with a class, whose post-processing is not known to work a second time."""
    from vllm.platforms import current_platform

    for name, module in model.named_modules():
        quant_method = post_processor(module)
        experts = _experts(quant_method)
        if quant_method is not None and not is_proven(module, quant_method):
            yield name, describe(module, quant_method)
        elif experts is not None and _prepares_weights(experts) and not current_platform.is_cpu():
            yield name, type(experts).__name__
        elif is_deferred(module) and getattr(module, "is_amx_bmm_enabled", False):
            yield name, type(module).__name__  # drops another module's weight after packing it


# ---- repairs -----------------------------------------------------------------------------------


def amend_worker() -> None:
    """See `rdt_vllm.amendments`: what is repaired in a worker; in its process."""
    from vllm.v1.worker.gpu_worker import Worker

    end_open_updates(Worker)
    refuse_sleep_in_updates(Worker)


def amend_executor(backend: str) -> None:
    """See `rdt_vllm.amendments.keep_answers_in_step`; in the process of the engine's core."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    keep_answers_in_step(MultiprocExecutor, backend)
