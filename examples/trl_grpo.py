"""TRL: GRPO in vLLM's server mode, its weights pulled instead of broadcast.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "rdt"}' \\
        --logprobs-mode processed_logprobs
    accelerate launch your_script.py    # calls use_rdt() before it makes its GRPOTrainer

TRL opens an NCCL group when the trainer is made, and broadcasts every parameter whole from its main
process before it generates. `use_rdt` takes these two steps over, on every process; the rest of TRL
stays as it is. Every trainer that generates by ``VLLMGeneration`` has them: GRPO, RLOO and others.
"""

from typing import Any

import torch
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from rdt_trainer import HttpClient, JobSettings, ModuleSource, RdtTrainer

_trainers: dict[int, tuple[RdtTrainer, HttpClient | None]] = {}  # by generation


def use_rdt() -> None:
    """Replaces how TRL opens its server's weight transfer, and how it sends weights."""
    VLLMClient.init_communicator = lambda self, device=0: None  # the first sync opens ours
    VLLMGeneration.sync_weights = sync_weights


def sync_weights(generation: Any) -> None:
    """On every process; returns when the server generates with the model's present weights."""
    if generation.mode != "server":
        raise ValueError(f"vllm_mode is {generation.mode!r}: expected 'server' beside use_rdt()")
    if id(generation) not in _trainers:
        _trainers[id(generation)] = _open(generation)
    trainer, client = _trainers[id(generation)]
    if client is not None:
        client.pause()
    generation.accelerator.wait_for_everyone()  # nobody writes before the server has paused
    trainer.send_weights()
    if client is not None:
        client.reset_prefix_cache()
        client.resume()


def close(generation: Any) -> None:
    """Detach the server: on every process, when training has ended."""
    trainer, client = _trainers.pop(id(generation))
    trainer.close()
    if client is not None:
        client.close()


def _open(generation: Any) -> tuple[RdtTrainer, HttpClient | None]:
    accelerator = generation.accelerator
    model = accelerator.unwrap_model(generation.model)
    client = None
    if accelerator.is_main_process:
        client = HttpClient(generation.vllm_client.base_url)
    trainer = RdtTrainer(
        ModuleSource.of_transformers(model, dtype=torch.bfloat16),  # what the server holds
        client,
        rank=accelerator.process_index,
        settings=JobSettings(num_producers=accelerator.num_processes),
    )
    trainer.init()
    return trainer, client
