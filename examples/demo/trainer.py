"""The trainer of the demo: a tiny causal language model that learns to count."""

from typing import Any

import torch

from rdt_trainer import ModuleSource, RayClient, RdtTrainer
from rdt_vllm.testing.tiny_models import TINY_MODELS

__all__ = ["DemoTrainer"]

SEQUENCE_TOKENS = 16
BATCH = 32
LEARNING_RATE = 3e-3


class DemoTrainer:
    """Trains the model, serves its weights, and writes them down for the proof.

    A plain class; the demo runs it as a Ray actor.
    """

    def __init__(self, model: str, seed: int = 0) -> None:
        torch.set_num_threads(1)
        self._model = TINY_MODELS[model].build(seed).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self._generator = torch.Generator().manual_seed(seed)
        self._trainer: RdtTrainer | None = None

    def connect(self, server: Any) -> None:
        """Attach the workers behind the actor handle ``server``; the rendezvous lives in Ray."""
        self._trainer = RdtTrainer(self.source(), RayClient(server), ray="auto")
        self._trainer.init()

    def source(self) -> ModuleSource:
        """What is served: the names and bytes that `save` writes down."""
        return ModuleSource.of_transformers(self._model)

    def train(self, num_steps: int) -> float:
        """Some optimizer steps on rising sequences; the last loss."""
        vocab = self._model.config.vocab_size
        loss = torch.zeros(())
        for _ in range(num_steps):
            first = torch.randint(vocab, (BATCH, 1), generator=self._generator)
            tokens = (first + torch.arange(SEQUENCE_TOKENS)) % vocab
            loss = self._model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return float(loss.detach())

    def sync(self) -> dict[str, float]:
        """Hand the weights over; milliseconds per stage."""
        assert self._trainer is not None, "connect first"
        report = self._trainer.send_weights()
        return {
            "begin": report.begin_seconds * 1e3,
            "gather": report.gather_seconds * 1e3,
            "publish": report.publish_seconds * 1e3,
            "wait": report.wait_seconds * 1e3,
            "finish": report.finish_seconds * 1e3,
            "total": report.total_seconds * 1e3,
        }

    def save(self, folder: str) -> int:
        """Write the weights as a checkpoint, which a fresh model will load; how many bytes."""
        self._model.save_pretrained(folder)
        return sum(param.nbytes for param in self._model.parameters())

    def close(self) -> None:
        """Leave the job."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
