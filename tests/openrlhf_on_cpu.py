"""OpenRLHF where there is no GPU: stand-ins for what it asks of CUDA, and a whole PPO run of its.

Run as a program with OpenRLHF's own arguments: `tests/test_recipes.py` does. Everything that trains
and generates is real: OpenRLHF's actors, DeepSpeed, Ray, vLLM. What stands in computes nothing:
attention that is spread over GPUs is imported and not called; devices are named and awaited.
"""

import json
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

__all__ = ["install"]

PROMPTS = [[5, 3, 8, 1, 7], [2, 9, 300, 41], list(range(20, 60))]


class _Host(str):
    """The name of the CPU, which reads as device 0 where OpenRLHF writes ``cuda:{device}``."""

    def __format__(self, spec: str) -> str:
        return "0"


def install() -> None:
    """In the driver, and in each of Ray's workers before anything else runs there."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    ring: Any = ModuleType("openrlhf.models.ring_attn_utils")  # the one that wants FlashAttention
    ring.get_ring_attn_group = ring.set_ring_attn_group = lambda *_: None
    ring.gather_and_pad_tensor = ring.unpad_and_slice_tensor = None
    sys.modules[ring.__name__] = ring

    import torch
    from torch.distributed import device_mesh

    torch.set_num_threads(1)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _Host("cpu")
    cuda.set_device = lambda device: None  # dynamo wants them apart
    cuda.synchronize = lambda device=None: None
    make = device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda kind, *given, **named: make("cpu", *given, **named)


def segments() -> set[Path]:
    """Shared memory of our processes: an engine whose actor is killed leaves its own behind."""
    found = set[Path]()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            paths = [each.path for each in child.memory_maps()]
            found |= {Path(path) for path in paths if path.startswith("/dev/shm/")}
    return found


def main() -> None:
    """OpenRLHF's command line; then what its engine says, and one that loads what it saved."""
    install()
    import ray
    from openrlhf.trainer import ray as ray_package
    from openrlhf.trainer.ray import vllm_engine
    from vllm import SamplingParams

    from examples import openrlhf_ppo

    ray.init(
        num_cpus=8,
        num_gpus=8,  # by name only
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": "tests.openrlhf_on_cpu.install"},
    )
    openrlhf_ppo.use_rdt()
    greedy = SamplingParams(
        temperature=0.0, max_tokens=8, logprobs=4, prompt_logprobs=4, ignore_eos=True
    )

    def said(engine: Any) -> list[Any]:
        """One prompt after the other, or which are batched together would be chance."""
        answers = [ray.get(engine.generate.remote(prompt, greedy)) for prompt in PROMPTS]
        return [
            [sorted((t, p.logprob) for t, p in place.items()) for place in places if place]
            for answer in answers
            for places in (answer.prompt_logprobs, answer.outputs[0].logprobs)
        ]

    create = vllm_engine.create_vllm_engines
    made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    found: dict[str, list[Any]] = {}

    def kept(*given: Any, **named: Any) -> list[Any]:
        engines = create(*given, **named)
        made.append((engines[0], given, named))
        found["first"] = said(engines[0])
        return engines

    of_package: Any = ray_package
    of_package.create_vllm_engines = kept
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    ((engine, given, named),) = made
    found["pulled"] = said(engine)
    left = segments()
    ray.kill(engine)
    (saved,) = (a.partition("=")[2] for a in sys.argv if a.startswith("--ckpt.output_dir="))
    (engine,) = create(*given[:2], saved, *given[3:], **named)
    found["saved"] = said(engine)
    left |= segments()
    ray.kill(engine)
    Path(os.environ["FOUND"]).write_text(json.dumps(found))
    ray.shutdown()
    for each in left:
        each.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
