import re
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

import rdt_vllm
from rdt_vllm import plugin


def test_vllm_finds_the_entry_point() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="rdt")

    assert found.load() is rdt_vllm.register


def test_importing_the_package_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, rdt_vllm; print(sorted({'vllm', 'torch', 'nixl', 'ray'} & set(sys.modules)))"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert result.stdout.strip() == "[]"


def test_a_vllm_without_weight_transfer_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setitem(sys.modules, "rdt_vllm._vllm", None)
    monkeypatch.delattr(rdt_vllm, "_vllm", raising=False)

    plugin.register()

    assert "backend 'rdt' is not available" in caplog.text


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("register_engine", "backend 'rdt' is not available"),
        ("amend_executor", "is available, but .* out of step; upgrade rdt-vllm"),
    ],
)
def test_a_vllm_that_has_changed_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str, message: str
) -> None:
    def changed(*args: object) -> None:
        raise AttributeError("type object 'MultiprocExecutor' has no attribute 'collective_rpc'")

    seams = SimpleNamespace(register_engine=print, amend_executor=print)
    setattr(seams, failing, changed)
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setitem(sys.modules, "rdt_vllm._vllm", seams)
    monkeypatch.setattr(rdt_vllm, "_vllm", seams, raising=False)

    plugin.register()

    assert re.search(message, caplog.text)


@pytest.mark.engine
def test_registering_is_lazy_idempotent_and_gives_vllm_our_engine() -> None:
    code = """
import sys
from vllm.plugins import load_general_plugins
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
import rdt_vllm

load_general_plugins()
rdt_vllm.register()
lazy = "rdt_vllm.engine" not in sys.modules and "rdt_bake" not in sys.modules
engine = WeightTransferEngineFactory._registry["rdt"]()
print(lazy, engine.__module__, engine.__name__, "ray" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )

    last = result.stdout.strip().splitlines()[-1]
    assert last.split()[:3] == ["True", "rdt_vllm.engine", "RdtWeightTransferEngine"]
