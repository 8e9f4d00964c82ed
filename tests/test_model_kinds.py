"""One model of each further kind, from the trainer through NIXL into a real vLLM: bit for bit.

The names are those that ``transformers`` writes into checkpoints. CPU kernels cannot run every
kind's forward in this vLLM; those are held to their tensors alone.
Dense models and mixtures of experts are in `test_end_to_end`, vision-language in
`test_vision_language`.
"""

from pathlib import Path

import pytest

from rdt_trainer import LocalClient, ModuleSource, RdtTrainer
from rdt_trainer.transformers_names import transformers_names
from rdt_transport.rendezvous import JobSettings
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from rdt_vllm.testing.report import check_exact, check_tensors, observe
from rdt_vllm.testing.serving import serving
from rdt_vllm.testing.tiny_models import TINY_MODELS, draw_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TIMEOUT_SECONDS = 60.0


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("deepseek-v2", True),
        ("jamba", False),
        ("falcon-h1", True),
        ("qwen3-next", True),
        ("gpt-oss", True),
    ],
)
def test_every_sync_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, runs: bool
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: starts faster
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    model = TINY_MODELS[name].build(seed=1)
    source = ModuleSource(model, names=transformers_names(model), persistent_buffers=True)
    folder = write_checkpoint(model, tmp_path / "served")
    with serving(folder, distributed_executor_backend="uni") as llm:
        trainer = RdtTrainer(
            source,
            LocalClient(llm),
            settings=JobSettings(num_producers=1, max_chunk_bytes=16 << 10),
            timeout_seconds=TIMEOUT_SECONDS,
        )
        try:
            trainer.init()
            for seed in (11, 12):
                draw_weights(model, seed)
                checkpoint = write_weights(source.iter_full(), tmp_path / str(seed))
                observe(llm)
                trainer.send_weights()
                if runs:
                    check_exact(llm, checkpoint).require()
                else:
                    (report,) = check_tensors(llm, checkpoint)
                    assert report.ok, report
            flip = "model.layers.0.input_layernorm.weight"
            (report,) = check_tensors(llm, checkpoint, flip=flip)
            assert {each.path for each in report.mismatches} == {flip}
            assert report.mismatches[0].first_byte is not None
        finally:
            trainer.close()
