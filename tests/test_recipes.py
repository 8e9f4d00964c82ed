"""The recipes of docs/recipes.md, run: each with its framework where that is installed."""

import ast
import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import fsdp2, openrlhf_ppo, plain_torch
from rdt_trainer import JobSettings, LocalClient, ModuleSource, RdtTrainer
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.wire.nixl import NixlWire
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from rdt_vllm.testing.http_server import HttpServer
from rdt_vllm.testing.report import check_exact, observe
from rdt_vllm.testing.serving import EngineCache
from rdt_vllm.testing.tiny_models import (
    TINY_QWEN2,
    TINY_QWEN3,
    TINY_QWEN3_MOE,
    TinyModel,
    draw_weights,
)

NEEDED = "needs {}: hatch run recipes:test"


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def assert_served(engine: TorchEngineClient, expected: dict[str, Tensor]) -> None:
    for worker, held in enumerate(engine.workers):
        assert_equal(held, {n: engine.shard(worker, t).contiguous() for n, t in expected.items()})


def run_ranks(function: Any, num_ranks: int, folder: Path) -> None:
    import torch.multiprocessing as mp

    mp.spawn(_as_rank, args=(function, num_ranks, f"file://{folder}/store"), nprocs=num_ranks)


def _as_rank(rank: int, function: Any, num_ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    try:
        function(rank)
    finally:
        torch.distributed.destroy_process_group()


def test_each_that_takes_arguments_says_which() -> None:
    for recipe in (plain_torch, fsdp2):
        for arguments, status in ((["--help"], 0), ([], 2)):
            command = [sys.executable, str(recipe.__file__), *arguments]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert ended.returncode == status
            assert "folder url" in (ended.stderr if status else ended.stdout)


# ---- plain PyTorch -------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_plain_loop_and_a_real_engine(engines: EngineCache, tmp_path: Path) -> None:
    model = TINY_QWEN3.build(seed=1)
    llm: Any = engines.get(write_checkpoint(model, engines.folder / "qwen3"), 1)
    observe(llm)
    reports = plain_torch.train(model, LocalClient(llm), num_steps=2)
    assert [report.committed for report in reports] == [(0,), (0,)]
    trained = ModuleSource.of_transformers(model).iter_full()
    check_exact(llm, write_weights(trained, tmp_path / "trained")).require()
    assert not check_exact(llm, engines.folder / "qwen3").ok  # training changed something


# ---- FSDP2 ---------------------------------------------------------------------------------------


def test_fsdp2_and_a_deployment_of_two_workers(tmp_path: Path) -> None:
    run_ranks(_train_fsdp2, 2, tmp_path)


def _train_fsdp2(rank: int) -> None:
    from torch.distributed.tensor import DTensor

    before = checkpoint(TINY_QWEN3, seed=1)
    model = TINY_QWEN3.build(seed=1).float()
    engine = TorchEngineClient(NixlWire, num_workers=2, timeout_seconds=120)
    reports = fsdp2.train(model, engine if rank == 0 else None, num_steps=2)
    assert [report.committed for report in reports] == [(0,), (0,)]
    trained = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        trained[name] = param.detach().full_tensor().bfloat16()
    assert trained.keys() == before.keys()
    matrices = [name for name in before if before[name].ndim > 1]  # a step of bf16's 1 is large
    assert not any(torch.equal(trained[name], before[name]) for name in matrices)
    if rank == 0:
        assert_served(engine, trained)
        assert engine.weight_version == "step-1"


# ---- TRL -----------------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_grpo_and_a_real_server(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason=NEEDED.format("trl"))
    import torch.multiprocessing as mp

    folder = write_checkpoint(TINY_QWEN3.build(seed=1), tmp_path / "served")
    write_tokenizer(folder)
    arguments = {"--skip-tokenizer-init": None, "--logprobs-mode": "processed_logprobs"}
    with HttpServer(folder, tmp_path / "server.log", arguments) as server:
        mp.spawn(_train_grpo, args=(server.url, str(folder), str(tmp_path / "out")), nprocs=1)


def write_tokenizer(folder: Path) -> None:
    """Words t0 to t511 are tokens 0 to 511."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t0")
    tokenizer.save_pretrained(folder)


def _train_grpo(_: int, url: str, folder: str, output: str) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from examples import trl_grpo

    trl_grpo.use_rdt()
    config = GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        max_steps=2,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=8,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        # Never equal within a group, or there would be nothing to learn.
        reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"t{i} t7 t9"} for i in range(8)]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    generation = trainer.vllm_generation
    ask = {"prompts": [[1, 2, 3, 5]], "temperature": 0.0, "max_tokens": 8, "logprobs": 0}
    ask["generation_kwargs"] = {"ignore_eos": True}

    def complete() -> Any:
        return generation.vllm_client.generate(**ask)

    first = complete()
    trainer.train()
    generation.sync_weights()  # TRL sends before it generates, so not after its last step
    trained, model = complete(), trainer.accelerator.unwrap_model(trainer.model)
    ours = logprobs_of(model, trained)
    theirs = torch.tensor(trained["logprobs"][0]).flatten()
    assert torch.allclose(theirs, ours, atol=0.1), (theirs, ours)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert not torch.allclose(theirs, logprobs_of(before, trained), atol=1.0)
    draw_weights(model, 1)
    generation.sync_weights()
    assert complete()["logprobs"] == first["logprobs"] != trained["logprobs"]
    trl_grpo.close(generation)


@torch.no_grad()
def logprobs_of(model: Any, answer: dict[str, Any]) -> Tensor:
    """Of the tokens that a server completed its one prompt with, by the model itself."""
    (prompt,), (completion,) = answer["prompt_ids"], answer["completion_ids"]
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    rows = torch.arange(len(completion))
    return logits.float().log_softmax(-1)[rows, torch.tensor(completion)]


# ---- OpenRLHF ------------------------------------------------------------------------------------


def test_an_actor_of_openrlhf_hands_the_weight_calls_to_its_engine() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    class Engine:
        """Answers each call of AsyncLLM's with its name."""

        def __init__(self) -> None:
            self.calls: list[tuple[Any, ...]] = []

        def __getattr__(self, name: str) -> Any:
            assert inspect.iscoroutinefunction(getattr(AsyncLLM, name)), name

            async def call(*arguments: Any) -> None:
                inspect.signature(getattr(AsyncLLM, name)).bind(self, *arguments)
                self.calls.append((name, *arguments))

            return call

    class Plain:
        async def __init__(self, model: str, **kwargs: Any) -> None:
            self.llm, self.kwargs = Engine(), kwargs

    kind = openrlhf_ppo.rdt_rollout_actor(Plain)
    actor = kind.__new__(kind)

    async def drive() -> None:
        await actor.__init__("MODEL", seed=1)
        await actor.init_weight_transfer_engine("request")
        await actor.start_weight_update()
        await actor.update_weights("request")
        await actor.finish_weight_update("7")
        await actor.shutdown_weight_transfer_engine()

    asyncio.run(drive())
    assert actor.kwargs == {"seed": 1, "weight_transfer_config": {"backend": "rdt"}}
    assert actor.llm.calls == [
        ("init_weight_transfer_engine", "request"),
        ("start_weight_update",),
        ("update_weights", "request"),
        ("finish_weight_update", "7"),
        ("shutdown_weight_transfer_engine",),
    ]


REWARD = """
import torch


def reward_func(queries, prompts, labels, **_):
    scores = torch.tensor([float(len(set(query.split()))) for query in queries])
    return {"rewards": scores, "scores": scores, "extra_logs": {}}
"""


@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_what_ppo_of_openrlhf_saves_its_engine_has_pulled(tmp_path: Path, zero_stage: int) -> None:
    """Its own command line, two ranks of a policy and one engine; see `tests.openrlhf_on_cpu`."""
    for needed in ("openrlhf", "deepspeed"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(NEEDED.format(needed))
    folder = write_checkpoint(TINY_QWEN3.build(seed=1), tmp_path / "served")
    write_tokenizer(folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"input": f"t{i} t7 t9"}) for i in range(8)))
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    options = {
        "actor.model_name_or_path": folder,
        "actor.num_gpus_per_node": 2,
        "actor.adam.lr": 1e-2,
        "actor.lr_warmup_ratio": 0,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "ckpt.output_dir": tmp_path / "saved",
        "ckpt.path": tmp_path / "checkpoints",
        "data.max_len": 64,
        "data.prompt_dataset": prompts,
        "ds.attn_implementation": "eager",
        "ds.zero_stage": zero_stage,
        "reward.remote_url": reward,
        "rollout.batch_size": 4,
        "rollout.max_new_tokens": 8,
        "rollout.n_samples_per_prompt": 2,
        "train.batch_size": 4,
        "vllm.num_engines": 1,
    }
    named = [f"--{name}={value}" for name, value in options.items()]
    log, found = tmp_path / "log", tmp_path / "found.json"
    environment = {"FOUND": str(found), "VLLM_CPU_KVCACHE_SPACE": "1", "UCX_NET_DEVICES": "lo"}
    with log.open("w") as output:
        status = subprocess.run(
            [sys.executable, "-m", "tests.openrlhf_on_cpu", *named, "--vllm.enforce_eager"],
            stdout=output,
            stderr=output,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=1100,
            check=False,
        ).returncode
    assert status == 0, log.read_text()[-8000:]
    said = json.loads(found.read_text())
    assert said["pulled"] == said["saved"] != said["first"]


def test_openrlhf_has_what_its_recipe_replaces() -> None:
    """Its published files, read and not imported."""
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(NEEDED.format("openrlhf"))
    root = Path(next(iter(spec.submodule_search_locations)))
    trainer = class_of(root / "trainer" / "ray" / "ppo_actor.py", "ActorPPOTrainer")
    assert arguments_of(trainer, "broadcast_to_vllm") == ["self"]
    assert arguments_of(trainer, "_init_vllm_sync_group") == ["self", "backend"]
    said = ast.unparse(trainer)
    for used in ("self.actor.model.module", "self.vllm_engines", "self.args", "ds_shape"):
        assert used in said, used
    policy = class_of(root / "trainer" / "ray" / "ppo_actor.py", "PolicyModelActor")
    assert arguments_of(policy, "init_model_from_pretrained")[0] == "self"
    assert ast.unparse(policy.decorator_list[0]).startswith("ray.remote")
    rollout = class_of(root / "trainer" / "ray" / "vllm_engine.py", "RolloutRayActor")
    assert ast.unparse(rollout.decorator_list[0]) == "ray.remote"
    assert "async def __init__" in ast.unparse(rollout)
    assert "vllm.AsyncEngineArgs(*args, **self.kwargs)" in ast.unparse(rollout)
    script = (root / "cli" / "train_ppo_ray.py").read_text()
    for used in ("import PolicyModelActor", "--ds.zero_stage", "--vllm.enable_prefix_caching"):
        assert used in script, used


def class_of(file: Path, name: str) -> ast.ClassDef:
    nodes = ast.walk(ast.parse(file.read_text()))
    return next(each for each in nodes if isinstance(each, ast.ClassDef) and each.name == name)


def arguments_of(kind: ast.ClassDef, method: str) -> list[str]:
    for each in kind.body:
        if isinstance(each, ast.FunctionDef) and each.name == method:
            return [argument.arg for argument in each.args.args]
    raise AssertionError(f"{kind.name} has no {method}")


def test_parameters_that_zero_has_parted_are_gathered_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = TINY_QWEN3.build(seed=1)
    expected = {name: param.detach().clone() for name, param in module.named_parameters()}
    here: list[torch.nn.Parameter] = []

    @contextlib.contextmanager
    def gathered(params: list[torch.nn.Parameter]) -> Iterator[None]:
        """As DeepSpeed's: the parameter is whole within, and has nothing outside."""
        (param,) = params
        here.append(param)
        param.data = wholes[param].clone()
        yield
        param.data.fill_(float("nan"))  # its memory is another's now
        param.data = param.data.new_empty(0)

    wholes = {param: expected[name] for name, param in module.named_parameters()}
    for param, whole in wholes.items():
        param.ds_shape = whole.shape
        param.data = whole.new_empty(0)
    zero = SimpleNamespace(GatheredParameters=gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
    engine = TorchEngineClient(NixlWire, timeout_seconds=60)
    with RdtTrainer(openrlhf_ppo.ZeroSource(module), engine) as trainer:
        trainer.init()
        assert here == []
        trainer.send_weights()
        assert_served(engine, expected)
    assert len(here) == len(expected)


# ---- Megatron-Core -------------------------------------------------------------------------------


def megatron_core() -> Any:
    pytest.importorskip("megatron.core", reason=NEEDED.format("megatron-core"))
    from examples import megatron_core

    return megatron_core


def megatron_model(tiny: TinyModel, dtype: torch.dtype, **stage: bool) -> Any:
    """What Megatron makes of the tiny model's sizes on this rank, drawn at random."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    wanted = tiny.config()
    has_norms = tiny.model_type.startswith("qwen3")
    experts = getattr(wanted, "num_experts", None)
    config = TransformerConfig(
        num_layers=wanted.num_hidden_layers,
        hidden_size=wanted.hidden_size,
        num_attention_heads=wanted.num_attention_heads,
        num_query_groups=wanted.num_key_value_heads,
        kv_channels=wanted.hidden_size // wanted.num_attention_heads,
        ffn_hidden_size=wanted.intermediate_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=not has_norms,
        normalization="RMSNorm",
        layernorm_epsilon=wanted.rms_norm_eps,
        qk_layernorm=has_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=experts,
        moe_ffn_hidden_size=getattr(wanted, "moe_intermediate_size", None),
        moe_router_topk=getattr(wanted, "num_experts_per_tok", 2),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(experts, qk_layernorm=has_norms, normalization="RMSNorm"),
        vocab_size=wanted.vocab_size,
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        **stage,
    ).eval()


def test_what_megatron_serves_computes_what_megatron_computes(tmp_path: Path) -> None:
    """Served by name into another implementation of the model: equal logits, so equal layouts."""
    megatron_core()
    run_ranks(_compute, 1, tmp_path)


def _compute(rank: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    # Megatron's forward asks for a CUDA device in two places that compute nothing here.
    no_fork: Any = SimpleNamespace(fork=contextlib.nullcontext)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    tensor_parallel.get_cuda_rng_tracker = lambda: no_fork
    parallel_state.initialize_model_parallel()
    for tiny in (TINY_QWEN3, TINY_QWEN2):  # with norms of queries and keys, and with biases
        ours = megatron_model(tiny, torch.float32)
        with torch.no_grad():
            for param in ours.parameters():
                param.normal_(1.0 if param.ndim == 1 else 0.0, 0.05)
            theirs = tiny.build(seed=1).float()
            theirs.load_state_dict(dict(megatron_core().MegatronSource(ours).iter_local()))
            tokens = torch.randint(theirs.config.vocab_size, (1, 24))
            mask = torch.ones(1, 1, 24, 24, dtype=torch.bool).triu(1)
            found = ours(tokens, torch.arange(24)[None], mask)
            expected = theirs(tokens).logits
        assert torch.allclose(found, expected, atol=1e-4), (found - expected).abs().max()
        assert expected.std() > 0.1  # or anything would be close


LAYOUTS = [
    (TINY_QWEN3, {"tensor": 2, "pipeline": 2}),
    (TINY_QWEN3_MOE, {"expert": 2, "pipeline": 2}),
]


def test_megatrons_shards_stages_and_experts_are_exact(tmp_path: Path) -> None:
    """Four ranks, two syncs each, held against the checkpoint that their parameters were cut from.

    By the formulas of Megatron's own comments, not by the recipe's views.
    """
    megatron_core()
    run_ranks(_sync_layouts, 4, tmp_path)


def _sync_layouts(rank: int) -> None:
    from megatron.core import parallel_state

    for tiny, sizes in LAYOUTS:
        named = {f"{kind}_model_parallel_size": size for kind, size in sizes.items()}
        parallel_state.initialize_model_parallel(**named)
        model = megatron_model(
            tiny,
            torch.bfloat16,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        engine = TorchEngineClient(NixlWire, num_workers=2, timeout_seconds=120)
        trainer = RdtTrainer(
            megatron_core().MegatronSource(model),
            engine if rank == 0 else None,
            rank=rank,
            settings=JobSettings(num_producers=4, max_chunk_bytes=16 << 10),
        )
        with trainer:
            for seed in (1, 2):
                theirs = checkpoint(tiny, seed)
                cut_for_megatron(model, theirs)
                if seed == 1:
                    trainer.init()
                report = trainer.send_weights()
                assert report.bytes_direct > 0, "what lies as it is served needs no slot"
                if rank == 0:
                    assert_served(engine, theirs)
        parallel_state.destroy_model_parallel()


def checkpoint(tiny: TinyModel, seed: int) -> dict[str, Tensor]:
    """What ``save_pretrained`` writes."""
    return {n: t.clone() for n, t in ModuleSource.of_transformers(tiny.build(seed)).iter_full()}


@torch.no_grad()
def cut_for_megatron(model: Any, theirs: dict[str, Tensor]) -> None:
    """Fill this rank's parameters: q1 q2 k1 v1 | q3 q4 k2 v2, gate | up, and its share of each."""
    from megatron.core import parallel_state

    config = model.config
    tp, tp_size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    first_expert = parallel_state.get_expert_model_parallel_rank() * (
        (config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    )

    def rows(name: str) -> Tensor:
        return theirs[name].chunk(tp_size)[tp]

    def columns(name: str) -> Tensor:
        return theirs[name].chunk(tp_size, 1)[tp]

    def qkv(prefix: str) -> Tensor:
        per_group = config.num_attention_heads // config.num_query_groups * config.kv_channels
        groups = config.num_query_groups // tp_size
        sizes = {"q": per_group, "k": config.kv_channels, "v": config.kv_channels}
        found = []
        for group in range(tp * groups, (tp + 1) * groups):
            for part, size in sizes.items():
                whole = theirs[f"{prefix}self_attn.{part}_proj.weight"]
                found.append(whole[group * size : (group + 1) * size])
        return torch.cat(found)

    def mlp(module: Any, prefix: str) -> None:
        gate_up = torch.cat([rows(f"{prefix}gate_proj.weight"), rows(f"{prefix}up_proj.weight")])
        module.linear_fc1.weight.copy_(gate_up)
        module.linear_fc2.weight.copy_(columns(f"{prefix}down_proj.weight"))

    if model.pre_process:
        model.embedding.word_embeddings.weight.copy_(rows("model.embed_tokens.weight"))
    for layer in model.decoder.layers:
        prefix = f"model.layers.{layer.layer_number - 1}."
        layer.input_layernorm.weight.copy_(theirs[f"{prefix}input_layernorm.weight"])
        layer.pre_mlp_layernorm.weight.copy_(theirs[f"{prefix}post_attention_layernorm.weight"])
        attention = layer.self_attention
        attention.linear_qkv.weight.copy_(qkv(prefix))
        attention.linear_proj.weight.copy_(columns(f"{prefix}self_attn.o_proj.weight"))
        attention.q_layernorm.weight.copy_(theirs[f"{prefix}self_attn.q_norm.weight"])
        attention.k_layernorm.weight.copy_(theirs[f"{prefix}self_attn.k_norm.weight"])
        if config.num_moe_experts:
            layer.mlp.router.weight.copy_(theirs[f"{prefix}mlp.gate.weight"])
            for index, expert in enumerate(layer.mlp.experts.local_experts):
                mlp(expert, f"{prefix}mlp.experts.{first_expert + index}.")
        else:
            mlp(layer.mlp, f"{prefix}mlp.")
    if model.post_process:
        model.decoder.final_layernorm.weight.copy_(theirs["model.norm.weight"])
        model.output_layer.weight.copy_(rows("lm_head.weight"))
