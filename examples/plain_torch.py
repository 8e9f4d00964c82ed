"""Plain PyTorch: a training loop, and a sync after every step. One process, no framework, no Ray.

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "rdt"}'
python examples/plain_torch.py MODEL http://127.0.0.1:8000
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rdt_trainer import Client, HttpClient, ModuleSource, RdtTrainer, SyncReport


def train(model: PreTrainedModel, client: Client, num_steps: int) -> list[SyncReport]:
    """Random tokens stand for rollouts and rewards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reports = []
    with RdtTrainer(ModuleSource.of_transformers(model), client) as trainer:
        trainer.init()  # every worker records what it reads, once
        for step in range(num_steps):
            tokens = torch.randint(model.config.vocab_size, (2, 16), device=model.device)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            client.pause("wait")  # nothing may be in flight while weights land
            reports.append(trainer.send_weights(f"step-{step}"))
            client.reset_prefix_cache()
            client.resume()
    return reports


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the model, as from_pretrained takes it")
    parser.add_argument("url", help="the server, as http://127.0.0.1:8000")
    given = parser.parse_args()
    served = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.bfloat16)
    for report in train(served, HttpClient(given.url), num_steps=3):
        print(report)
