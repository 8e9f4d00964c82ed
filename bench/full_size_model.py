"""A published model as vLLM builds it for one rank, without any weight.

Everything is on torch's meta device and in one process, which plays the rank: loading weights needs
no collective.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.published_sizes import PublishedSize
from census.modes import Mode

__all__ = ["build_model"]


def build_model(folder: Path, sizes: PublishedSize, mode: Mode) -> tuple[nn.Module, Any]:
    """The rank's model and its `VllmConfig`, whose file goes to ``folder``; once a process.

    Call `census.startup.prepare_process` before.
    """
    from vllm.model_executor.layers.fused_moe import expert_map_manager
    from vllm.model_executor.model_loader import utils as loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from census.models import vllm_config_of
    from census.ranks import play_rank

    (folder / "config.json").write_text(json.dumps(sizes.configuration()))
    config = vllm_config_of(folder, mode)
    play_rank(config, mode)
    initialize_model: Any = loading.initialize_model  # a tracing decorator hides its signature
    manager: Any = expert_map_manager
    determine_expert_map = manager.determine_expert_map

    def with_values(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):  # loaders ask which experts are here
            return determine_expert_map(*args, **kwargs)

    manager.determine_expert_map = with_values
    with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        return initialize_model(vllm_config=config).eval(), config
