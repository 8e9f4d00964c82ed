"""What `rdt_vllm.testing` takes from vLLM beyond `rdt_vllm._vllm`; imported in workers only."""

from vllm.config.load import LoadConfig
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype

__all__ = [
    "DefaultModelLoader",
    "EngineArgs",
    "LoadConfig",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "ensure_model_parallel_initialized",
    "init_distributed_environment",
    "initialize_model",
    "process_weights_after_loading",
    "set_default_torch_dtype",
]
