"""On a GPU, with vLLM's own models: graphs captured before a sync see the weights after it."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(600),
]

TIMEOUT_SECONDS = 60.0
SHARED: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
QWEN3 = {
    **SHARED,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
}
DEEPSEEK_V2 = {
    **SHARED,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}


class GpuModel:
    """One of vLLM's models, built by its own loader from dummy weights, and syncs for it.

    The transport is a copy in memory; everything from the landed bytes on is a worker's.
    """

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import (
            ensure_model_parallel_initialized,
            init_distributed_environment,
        )
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model_loader

        (folder / "config.json").write_text(json.dumps(settings))
        dense = settings["model_type"] == "qwen3"
        self.config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=1024,
            enforce_eager=True,
            load_format="dummy",
            attention_backend="TRITON_ATTN" if dense else "TRITON_MLA",
            gpu_memory_utilization=0.1,
        ).create_engine_config()
        with set_current_vllm_config(self.config):
            init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "nccl")
            ensure_model_parallel_initialized(1, 1)
            loader: Any = get_model_loader(self.config.load_config)
            self.model: Any = loader.load_model(
                vllm_config=self.config, model_config=self.config.model_config
            )

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        """A checkpoint, as transformers names it, on the GPU."""
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModelForCausalLM

        from rdt_vllm.testing.checkpoint import write_checkpoint
        from rdt_vllm.testing.tiny_models import draw_weights

        config = AutoConfig.from_pretrained(self.config.model_config.model)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        draw_weights(model, seed)
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(model, Path(folder))
            return load_file(f"{folder}/model.safetensors", device="cuda")

    def reload(self, weights: dict[str, torch.Tensor]) -> None:
        """What vLLM itself makes of ``weights``."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        with set_current_vllm_config(self.config), torch.no_grad():
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(weights.items()))
            finalize_layerwise_reload(self.model, self.config.model_config)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer, derived ones included."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return dict(named)


class Sync:
    """A plan for a model, and what carries it out."""

    def __init__(
        self, gpu: GpuModel, weights: dict[str, torch.Tensor], live: bool, direct: bool
    ) -> None:
        from rdt_plan import ConsumerId, Manifest, ParamMeta, build_plan, group_ordered
        from rdt_plan.direct import DirectRule
        from rdt_transport.events import CudaEvents
        from rdt_vllm.install import Installer
        from rdt_vllm.probe import Probe
        from rdt_vllm.recording import record_model
        from rdt_vllm.units import InstallUnits

        manifest = Manifest.build(
            ParamMeta(name, "bfloat16", tuple(weights[name].shape))
            for name in group_ordered(list(weights))
        )
        recording = record_model(gpu.model, manifest.params, gpu.config)
        self.units = InstallUnits(
            gpu.model, recording, Probe(gpu.model, gpu.config) if live else None
        )
        self.plan = build_plan(
            manifest,
            recording.writes,
            ConsumerId(0, 0),
            num_workers=1,
            max_chunk_bytes=1 << 20,
            programs=recording.programs,
            direct=DirectRule(
                {0: frozenset(weights if direct else ())}, frozenset(self.units.live_tensors())
            ),
        )
        self.events = CudaEvents("cuda")
        self.installer = Installer(
            gpu.model, self.plan, self.units, vllm_config=gpu.config, events=self.events
        )

    def run(self, weights: dict[str, torch.Tensor]) -> None:
        """One whole sync, the device busy all along; nothing synchronises but what ours does."""
        import rdt_bake
        from rdt_vllm.testing.install_worker import pack_chunk

        failures: list[BaseException] = []

        class Sink:
            def scattered(self, index: int, event: Any) -> None: ...

            def scatter_failed(self, index: int, error: BaseException) -> None:
                failures.append(error)

            def fail(self, error: BaseException) -> None:
                failures.append(error)

        host = {name: tensor.cpu() for name, tensor in weights.items()}
        packed = {
            chunk.index: pack_chunk(chunk, host).cuda()
            for chunk in self.plan.chunks
            if not chunk.is_direct
        }
        torch.cuda.synchronize()  # as when a READ has ended
        self.installer.begin(Sink())
        for chunk in self.plan.chunks:
            if chunk.is_direct:
                for place in chunk.placements:
                    values = rdt_bake.read_slice(weights[place.slice.name], place.slice)
                    into = self.units.live_tensors()[place.module, place.param]
                    rdt_bake.apply_placement(place, values.view(-1).view(torch.uint8), into)
            else:
                self.installer.install(chunk, packed[chunk.index])
        self.installer.finish(TIMEOUT_SECONDS)
        assert not failures


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v2"])
def gpu(request: pytest.FixtureRequest) -> Iterator[GpuModel]:
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    settings = QWEN3 if request.param == "qwen3" else DEEPSEEK_V2
    with tempfile.TemporaryDirectory() as folder:
        yield GpuModel(settings, Path(folder))
        destroy_model_parallel()
        destroy_distributed_environment()


@pytest.mark.parametrize(("live", "direct"), [(True, True), (True, False), (False, False)])
def test_syncs_are_what_vllm_makes_of_the_same_weights(
    gpu: GpuModel, live: bool, direct: bool
) -> None:
    first, second = gpu.weights(1), gpu.weights(2)
    gpu.reload(second)
    expected = {name: tensor.clone() for name, tensor in gpu.tensors().items()}
    gpu.reload(first)
    where = {name: tensor.data_ptr() for name, tensor in gpu.tensors().items()}
    assert not all(torch.equal(gpu.tensors()[name], each) for name, each in expected.items())

    sync = Sync(gpu, first, live, direct)
    assert {unit.is_live for unit in sync.units.all} == {live}, sync.units.summary()
    assert (sync.plan.direct_bytes > 0, sync.plan.staged_bytes > 0) == (direct, not direct)
    sync.run(first)
    sync.run(second)

    found = gpu.tensors()
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == where
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []
    sync.installer.close(TIMEOUT_SECONDS)


@pytest.mark.parametrize(("live", "direct"), [(True, True), (True, False), (False, False)])
def test_a_graph_captured_before_a_sync_computes_with_the_weights_after_it(
    gpu: GpuModel, live: bool, direct: bool
) -> None:
    first, second = gpu.weights(1), gpu.weights(2)
    modules = dict(gpu.model.named_modules())
    layer: Any = modules["model.layers.0.mlp"]
    norm: Any = modules["model.norm"]
    absorbed = [
        module.get_parameter(name)
        for module in modules.values()
        for name in ("W_UV", "W_UK_T")
        if name in module._parameters
    ]
    inputs = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
    output = torch.empty(8, 256, device="cuda", dtype=torch.bfloat16)
    sums = torch.zeros(max(1, len(absorbed)), device="cuda")

    def forward() -> None:
        output.copy_(nn.functional.linear(layer(inputs), norm.weight.expand(256, 256)))
        for at, tensor in enumerate(absorbed):
            sums[at].copy_(tensor.float().square().sum())

    def outcome() -> list[torch.Tensor]:
        graph.replay()
        torch.cuda.synchronize()
        return [output.clone(), sums.clone()]

    from vllm.config import set_current_vllm_config

    with torch.no_grad(), set_current_vllm_config(gpu.config):
        forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
    gpu.reload(second)
    expected = outcome()
    sync = Sync(gpu, first, live, direct)

    sync.run(first)
    before = outcome()
    sync.run(second)

    assert not torch.equal(before[0], expected[0])
    assert not absorbed or not torch.equal(before[1], expected[1])
    assert all(map(torch.equal, outcome(), expected))
    sync.installer.close(TIMEOUT_SECONDS)
