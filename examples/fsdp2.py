"""FSDP2: every rank serves its own shards; nothing is gathered, on no rank.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "rdt"}'
    torchrun --nproc-per-node 4 examples/fsdp2.py MODEL http://127.0.0.1:8000

Masters are float32; what is served is cast to the dtype of the checkpoint, shard by shard.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from rdt_trainer import (
    Client,
    HttpClient,
    JobSettings,
    RdtTrainer,
    ShardedModuleSource,
    SyncReport,
)


def train(model: PreTrainedModel, client: Client | None, num_steps: int) -> list[SyncReport]:
    """On every rank of the default process group; rank 0 has the client."""
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = ShardedModuleSource.of_transformers(model, dtype=torch.bfloat16)
    settings = JobSettings(num_producers=num_ranks)
    reports = []
    with RdtTrainer(source, client, rank=rank, settings=settings) as trainer:
        trainer.init()
        for step in range(num_steps):
            tokens = torch.randint(model.config.vocab_size, (2, 16), device=model.device)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if client is not None:
                client.pause("wait")
            distributed.barrier()  # nobody writes before the server has paused
            reports.append(trainer.send_weights(f"step-{step}"))
            if client is not None:
                client.reset_prefix_cache()
                client.resume()
    return reports


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the model, as from_pretrained takes it")
    parser.add_argument("url", help="the server, as http://127.0.0.1:8000")
    given = parser.parse_args()
    distributed.init_process_group()
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(distributed.get_node_local_rank())
    served = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32)
    served = served.to(torch.accelerator.current_accelerator() or "cpu")
    client = HttpClient(given.url) if distributed.get_rank() == 0 else None
    for report in train(served, client, num_steps=3):
        print(report)
    distributed.destroy_process_group()
