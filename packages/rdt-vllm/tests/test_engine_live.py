"""Live and direct installing inside a real `vllm.LLM`: by default, and switched off by a field."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rdt_vllm.engine import RdtWeightTransferEngine
from rdt_vllm.install import Installer
from rdt_vllm.testing.install_worker import addresses, structure
from rdt_vllm.testing.report import check_exact, observe
from rdt_vllm.testing.single_trainer import SingleTrainer

pytestmark = pytest.mark.engine


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def live_modules(engine: RdtWeightTransferEngine) -> set[str]:
    assert isinstance(engine.installer, Installer)
    units = engine.installer._units
    return {path for path, unit in units.of.items() if unit.is_live}


@pytest.mark.parametrize(
    ("fields", "stable", "is_live", "is_direct"),
    [
        ({}, True, True, True),
        ({}, False, True, False),
        ({"direct": False}, True, True, False),
        ({"live": False}, True, False, False),
        ({"live": False, "direct": False}, True, False, False),
    ],
)
def test_syncs_are_exact_in_every_way_and_say_which(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., SingleTrainer],
    folders: list[Path],
    fields: dict[str, bool],
    stable: bool,
    is_live: bool,
    is_direct: bool,
) -> None:
    trainer = make_trainer(stable=stable)
    trainer.attach(**fields)
    before, where = structure(engine.model), addresses(engine.model)
    live = live_modules(engine)
    assert live == (
        {p for p, _ in engine.model.named_modules() if "norm" in p} if is_live else set()
    )
    norms = sum(
        tensor.nbytes
        for path in live
        for tensor in engine.model.get_submodule(path).parameters(recurse=False)
    )

    for folder in (folders[1], folders[2]):
        observe(llm)
        trainer.send(weights_of(folder))

        check_exact(llm, folder).require()
        assert not check_exact(llm, folder, flip="model.norm.weight").ok
        (traffic,) = llm.collective_rpc("rdt_traffic")
        assert traffic["bytes_direct"] == (norms if is_direct else 0)
        assert traffic["bytes_direct"] + traffic["bytes_staged"] == traffic["bytes_pulled"]
        assert structure(engine.model) == before
        assert addresses(engine.model) == where
        assert not engine.torn


def test_memory_that_sleep_takes_away_is_not_read_into(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., SingleTrainer],
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.vllm_config.model_config, "enable_sleep_mode", True)
    trainer = make_trainer(stable=True)
    trainer.attach()
    llm.collective_rpc("sleep")  # a CPU's does nothing, and says so
    llm.collective_rpc("wake_up")

    observe(llm)
    trainer.send(weights_of(folders[1]))

    assert live_modules(engine)
    check_exact(llm, folders[1]).require()
    (traffic,) = llm.collective_rpc("rdt_traffic")
    assert traffic["bytes_direct"] == 0


def test_a_sync_given_up_after_direct_reads_has_torn_the_worker_and_the_next_heals_it(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., SingleTrainer],
    folders: list[Path],
) -> None:
    trainer = make_trainer(stable=True)
    trainer.attach()
    trainer.begin()
    trainer.llm.start_weight_update()
    trainer.llm.update_weights(trainer.update_info())
    trainer.publish(weights_of(folders[1]), num_groups=2)
    engine.shutdown()
    assert engine.torn
    trainer.close()

    trainer = make_trainer(stable=True)
    trainer.attach()
    observe(llm)
    trainer.send(weights_of(folders[2]))
    assert not engine.torn
    check_exact(llm, folders[2]).require()
