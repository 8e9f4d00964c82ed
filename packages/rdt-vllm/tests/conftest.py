"""One real `vllm.LLM` in this process for each module that asks for it, and trainers for it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rdt_vllm.engine import RdtWeightTransferEngine
    from rdt_vllm.testing.single_trainer import SingleTrainer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one small model with tied embeddings, of three seeds."""
    from rdt_vllm.testing.checkpoint import write_checkpoint
    from rdt_vllm.testing.tiny_models import TinyModel

    tiny = TinyModel("llama-tied", "llama", {"tie_word_embeddings": True})
    root = tmp_path_factory.mktemp("checkpoints")
    return [write_checkpoint(tiny.build(seed), root / str(seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def llm(folders: list[Path]) -> Iterator[Any]:
    """An engine without processes of its own, which serves the first of ``folders``."""
    from rdt_vllm.testing.serving import serving

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("UCX_NET_DEVICES", "lo")
        with serving(folders[0], distributed_executor_backend="uni") as llm:
            yield llm


@pytest.fixture
def engine(llm: Any) -> "RdtWeightTransferEngine":
    """The transfer engine of its only worker."""
    from rdt_vllm.engine import RdtWeightTransferEngine

    (engine,) = llm.collective_rpc(lambda worker: worker.weight_transfer_engine)
    assert isinstance(engine, RdtWeightTransferEngine)
    return engine


@pytest.fixture
def make_trainer(llm: Any, folders: list[Path]) -> Iterator["Callable[..., SingleTrainer]"]:
    """Makes trainers of the model in ``folders``; the worker is detached in the end."""
    from safetensors.torch import load_file

    from rdt_vllm.testing.single_trainer import SingleTrainer

    weights = load_file(folders[0] / "model.safetensors")
    with ExitStack() as stack:

        def make(**settings: Any) -> SingleTrainer:
            trainer = SingleTrainer(llm, weights, **settings)
            stack.callback(trainer.close)
            return trainer

        yield make
        llm.shutdown_weight_transfer_engine()
