"""A trainer taken apart: real transport, and each step of a sync a call of its own, to fail at."""

import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from rdt_plan import Manifest, ParamMeta, group_ordered
from rdt_transport.producer import Producer
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import JobSettings, RendezvousClient, host_local
from rdt_transport.wire.nixl import NixlWire

__all__ = ["TIMEOUT_SECONDS", "SingleTrainer"]

TIMEOUT_SECONDS = 30.0


class SingleTrainer:
    """One producer, its rendezvous, and the calls that a trainer makes to vLLM, one by one.

    Args:
        llm: has the weight routes of ``vllm.LLM``.
        weights: every tensor, as it will be published: names, shapes and dtypes are taken from it.
        job: the job's name.
        stable: publish everything from memory of its own, which may be read directly.
    """

    def __init__(
        self,
        llm: Any,
        weights: Mapping[str, torch.Tensor],
        job: str = "job",
        stable: bool = False,
    ) -> None:
        self.llm = llm
        self._stable = {name: tensor.clone() for name, tensor in weights.items() if stable}
        self._undo = ExitStack()
        params = {
            name: ParamMeta(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in weights.items()
        }
        self.manifest = Manifest.build([params[name] for name in group_ordered(list(params))])
        settings = JobSettings(num_producers=1, max_chunk_bytes=1 << 16)
        host = host_local(job, secrets.token_hex(8), settings)
        self._undo.callback(host.close)
        self.address = host.address
        progress = ProgressThread(lambda: NixlWire("trainer"), name="trainer")
        self._undo.callback(progress.close)
        self.client = RendezvousClient(
            self.address, on_event=lambda event: self.producer.on_event(event)
        )
        self._undo.callback(self.client.close)
        self.producer = Producer(
            progress,
            self.client,
            rank=0,
            manifest=self.manifest,
            settings=settings,
            sources=self._stable,
        )
        self._undo.callback(self.producer.close)
        self.producer.open(TIMEOUT_SECONDS)
        self.session = self.client.job(TIMEOUT_SECONDS).session
        self.epoch = 0

    def close(self) -> None:
        """End all of it, as a trainer's death would; idempotent."""
        self._undo.close()

    def attach(self, **fields: Any) -> None:
        """Have the workers attach; ``fields`` win over this job's own."""
        info = {**self.address.init_info(), "timeout_seconds": TIMEOUT_SECONDS, **fields}
        self.llm.init_weight_transfer_engine({"init_info": info})

    def update_info(self, **fields: Any) -> dict[str, Any]:
        """The request of ``update_weights`` for the last epoch begun; ``fields`` win."""
        return {"update_info": {"session": self.session, "epoch": self.epoch, **fields}}

    def begin(self) -> None:
        """Open the next epoch."""
        self.epoch += 1
        self.producer.begin(self.client.begin(0, self.epoch, TIMEOUT_SECONDS))

    def publish(self, weights: Mapping[str, torch.Tensor], num_groups: int | None = None) -> None:
        """Publish the first ``num_groups`` gather groups, all without; blocks on credit."""
        for group in self.producer.groups[:num_groups]:
            tensors = {name: weights[name] for name in self.manifest.groups[group].names}
            for name in tensors.keys() & self._stable.keys():
                tensors[name] = self._stable[name].copy_(tensors[name])
            self.producer.publish(group, tensors, TIMEOUT_SECONDS)

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        """One whole sync."""
        self.begin()
        with ThreadPoolExecutor(1) as pool:
            published = pool.submit(self.publish, weights)
            self.llm.start_weight_update()
            self.llm.update_weights(self.update_info())
            self.llm.finish_weight_update()
            published.result(TIMEOUT_SECONDS)
        self.producer.finish(TIMEOUT_SECONDS)
