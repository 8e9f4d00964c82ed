"""Making a process one that can build any model of vLLM's on a CPU."""

import os

import torch

from census.stand_ins import install_stand_ins

__all__ = ["prepare_process"]

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_process() -> None:
    """Import vLLM with the patches of `census.patches`, for this process and those it forks.

    Call it once, in a process that serves no model: the patches stay.
    """
    os.environ.update(_ENVIRONMENT)
    torch.set_num_threads(1)
    install_stand_ins()
    import vllm.model_executor.model_loader.utils  # noqa: F401  (once; the cases are forks)

    from census.patches import patch_vllm

    patch_vllm()
