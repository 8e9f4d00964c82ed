"""The engine inside a real `vllm.LLM` in this process, fed by a real producer over NIXL."""

import logging
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rdt_transport.errors import RdtTransportError
from rdt_vllm.engine import RdtWeightTransferEngine
from rdt_vllm.errors import AttachedElsewhereError, InitInfoError, RdtVllmError, UnsupportedError
from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.report import check_exact, greedy_tokens, observe
from rdt_vllm.testing.single_trainer import SingleTrainer
from rdt_vllm.testing.tiny_models import TINY_LLAMA

pytestmark = pytest.mark.engine


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_syncs_are_exact_and_the_worker_outlives_its_trainer(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., SingleTrainer],
    folders: list[Path],
) -> None:
    trainer = make_trainer()
    trainer.attach()
    for folder in (folders[1], folders[2]):
        observe(llm)
        trainer.send(weights_of(folder))

        report = check_exact(llm, folder)
        assert report.ok, report
        assert not engine.torn
        assert not check_exact(llm, folder, flip="model.norm.weight").ok

    tokens = greedy_tokens(llm, [1, 2, 3], 4)
    llm.shutdown_weight_transfer_engine()
    llm.shutdown_weight_transfer_engine()
    trainer.close()

    assert greedy_tokens(llm, [1, 2, 3], 4) == tokens
    assert not [t.name for t in threading.enumerate() if t.name.startswith("rdt-")]


def test_a_job_may_be_initialised_again_and_another_may_not(
    llm: Any, make_trainer: Callable[..., SingleTrainer], folders: list[Path]
) -> None:
    first, second = make_trainer(), make_trainer(job="another")
    first.attach()
    first.attach()

    with pytest.raises(AttachedElsewhereError, match=r"'job'.*'another'"):
        second.attach()

    observe(llm)
    first.send(weights_of(folders[1]))
    assert check_exact(llm, folders[1]).ok
    llm.shutdown_weight_transfer_engine()
    second.attach()
    observe(llm)
    second.send(weights_of(folders[2]))
    assert check_exact(llm, folders[2]).ok


def test_what_is_wrong_in_an_init_is_refused(
    llm: Any, make_trainer: Callable[..., SingleTrainer]
) -> None:
    trainer = make_trainer()
    with pytest.raises(RdtTransportError, match="token"):
        trainer.attach(token="wrong")
    with pytest.raises(RdtTransportError, match="host:port"):
        trainer.attach(address="nowhere")
    with pytest.raises(InitInfoError, match="replica 3 of 2"):
        trainer.attach(replica=3, num_replicas=2)
    with pytest.raises(InitInfoError, match="positive"):
        trainer.attach(timeout_seconds=0)
    trainer.attach()


def test_neither_errors_nor_log_lines_show_the_token(
    llm: Any, make_trainer: Callable[..., SingleTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    first, second = make_trainer(), make_trainer(job="another")
    errors = []
    first.attach()
    for trainer, fields in (
        (second, {}),
        (first, {"replica": 1}),
        (first, {"no_such_field": 1}),
        (first, {"address": "127.0.0.1:1", "timeout_seconds": 0.1}),
    ):
        with pytest.raises((RdtTransportError, RdtVllmError, ValueError)) as caught:
            trainer.attach(**fields)
        errors.append("".join(traceback.format_exception(caught.value)))
    assert "attached to job" in caplog.text
    for trainer in (first, second):
        assert trainer.address.token not in caplog.text + "".join(errors)


def test_weights_that_nobody_consumes_are_refused(llm: Any, folders: list[Path]) -> None:
    trainer = SingleTrainer(llm, {"other.weight": torch.zeros(4)})
    try:
        with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM.*'other\.weight'"):
            trainer.attach()
    finally:
        trainer.close()


def test_a_model_hook_is_refused(
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., SingleTrainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        type(engine.model), "process_weights_after_loading", lambda self: self.pack(), raising=False
    )
    with pytest.raises(UnsupportedError, match=r"as a whole.*by its pack"):
        make_trainer().attach()


def test_weights_that_only_others_consume_are_no_error(llm: Any, tmp_path: Path) -> None:
    """A trainer with an untied head has one weight more than this worker consumes."""
    folder = write_checkpoint(TINY_LLAMA.build(1), tmp_path / "untied")
    trainer = SingleTrainer(llm, weights_of(folder))
    try:
        trainer.attach()
        observe(llm)
        trainer.send(weights_of(folder))
        assert check_exact(llm, folder).ok
    finally:
        llm.shutdown_weight_transfer_engine()
        trainer.close()
