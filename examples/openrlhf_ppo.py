"""OpenRLHF: its rollout actors pull what they hold; rank 0 broadcasts nothing.

In place of ``python -m openrlhf.cli.train_ppo_ray``, with the same arguments:

    python -m examples.openrlhf_ppo --actor.model_name_or_path MODEL ...

In a script of your own, call `use_rdt` before that module is imported.

OpenRLHF sends weights in ``ActorPPOTrainer.broadcast_to_vllm``, on every rank of the policy: one
parameter at a time, gathered where ZeRO-3 has parted it. `send` takes that step over, and keeps the
gathering; up to ZeRO-2 the parameters are served from where they are. Run with OpenRLHF 0.11 on
CPUs, where what it asks of CUDA is stood in for, and one engine of one worker.
"""

import runpy
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rdt_plan.groups import group_ordered
from rdt_trainer import JobSettings, ModuleSource, RayClient, RdtTrainer, SourceMeta


def rdt_rollout_actor(plain: type) -> type:
    """The class of OpenRLHF's rollout actor, with vLLM's weight calls handed to its engine."""

    class RdtRolloutActor(plain):
        async def __init__(self, *args: Any, **kwargs: Any) -> None:
            await super().__init__(*args, weight_transfer_config={"backend": "rdt"}, **kwargs)

        async def init_weight_transfer_engine(self, request: Any) -> None:
            await self.llm.init_weight_transfer_engine(request)

        async def start_weight_update(self) -> None:
            await self.llm.start_weight_update()

        async def update_weights(self, request: Any) -> None:
            await self.llm.update_weights(request)

        async def finish_weight_update(self, weight_version: str | None = None) -> None:
            await self.llm.finish_weight_update(weight_version)

        async def shutdown_weight_transfer_engine(self) -> None:
            await self.llm.shutdown_weight_transfer_engine()

    return RdtRolloutActor


def use_rdt() -> None:
    """In the driver: engines get the backend and its calls, the policy's actors send as `send`."""
    import ray
    from openrlhf.trainer.ray import ppo_actor, vllm_engine

    plain = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class
    vllm_engine.RolloutRayActor = ray.remote(rdt_rollout_actor(plain))
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(rdt_policy_actor())


def rdt_policy_actor() -> type:
    """The class of OpenRLHF's policy actor, whose trainer sends as `send` does."""
    from openrlhf.trainer.ray import ppo_actor

    class RdtPolicyActor(ppo_actor.PolicyModelActor.__ray_metadata__.modified_class):
        def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
            trainer = ppo_actor.ActorPPOTrainer
            trainer._init_vllm_sync_group = lambda self, backend: None  # the first sync opens ours
            trainer.broadcast_to_vllm = send
            return super().init_model_from_pretrained(*args, **kwargs)

    return RdtPolicyActor


def send(trainer: Any) -> None:
    """In place of ``broadcast_to_vllm``, on every rank; OpenRLHF lets no engine generate now."""
    if not hasattr(trainer, "rdt"):
        trainer.rdt, trainer.rdt_clients = _open(trainer)
    trainer.rdt.send_weights()
    if trainer.args.vllm.enable_prefix_caching:
        for client in trainer.rdt_clients:
            client.reset_prefix_cache()
    torch.distributed.barrier()


def _open(trainer: Any) -> tuple[RdtTrainer, list[RayClient]]:
    """An engine is a deployment of its own."""
    args, rank = trainer.args, torch.distributed.get_rank()
    engines, workers = trainer.vllm_engines, args.vllm.tensor_parallel_size
    clients = [RayClient(e, num_workers=workers) for e in engines] if rank == 0 else []
    module = trainer.actor.model.module
    opened = RdtTrainer(
        ZeroSource(module) if args.ds.zero_stage == 3 else ModuleSource.of_transformers(module),
        clients,
        rank=rank,
        settings=JobSettings(torch.distributed.get_world_size(), len(engines)),
        ray="auto",
        device=None if torch.accelerator.current_accelerator() is None else "cuda",
    )
    opened.init()
    return opened, clients


class ZeroSource:
    """A module whose parameters ZeRO-3 has parted among all ranks; a `WeightSource`.

    Its names are taken to be its checkpoint's, as OpenRLHF takes them.
    """

    def __init__(self, module: nn.Module) -> None:
        params = dict(module.named_parameters())
        self._params = {name: params[name] for name in group_ordered(params)}

    @cached_property
    def metadata(self) -> list[SourceMeta]:
        return [
            SourceMeta(name, param.dtype, tuple(getattr(param, "ds_shape", param.shape)))
            for name, param in self._params.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A collective a parameter; what is yielded outlives the parameter's parting."""
        import deepspeed

        for name, param in self._params.items():
            with deepspeed.zero.GatheredParameters([param]):
                whole = param.data.clone()
            yield name, whole
            del whole


if __name__ == "__main__":
    use_rdt()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
