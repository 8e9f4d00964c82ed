"""What engines are started with; starting and stopping them is in ``test_exactness``."""

import gc
import importlib
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rdt_vllm.testing.report import PROBE
from rdt_vllm.testing.serving import engine_arguments, engine_environment, import_apart


def test_arguments_are_eager_and_observable_and_can_be_overridden() -> None:
    arguments = engine_arguments("folder", 2, max_model_len=128, weight_transfer_config=None)

    assert arguments["model"] == "folder"
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["max_model_len"] == 128
    assert arguments["enforce_eager"] is True
    assert arguments["enable_prefix_caching"] is False
    assert arguments["worker_extension_cls"] == PROBE
    assert "weight_transfer_config" not in arguments
    assert engine_arguments("folder")["weight_transfer_config"] == {"backend": "rdt"}


@pytest.mark.parametrize(
    ("cores", "num_workers", "binding"),
    [
        ({0, 1}, 1, "0,1"),
        ({0, 1}, 2, "0|1"),
        ({2, 3, 5, 7, 8}, 2, "2,3|5,7"),
        ({4}, 2, "4|4"),
    ],
)
def test_workers_get_equal_shares_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], num_workers: int, binding: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    before = dict(os.environ)

    with engine_environment(num_workers):
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == binding
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"  # the caller's wins

    assert dict(os.environ) == before


class Engine:
    """Something that can be referred to weakly."""


def engine_made_after(import_module: Callable[[str], ModuleType], name: str) -> weakref.ref[Engine]:
    import_module(name)
    engine = Engine()
    return weakref.ref(engine)


@pytest.mark.parametrize(
    ("import_module", "is_kept"), [(importlib.import_module, True), (import_apart, False)]
)
def test_a_module_that_keeps_its_import_error_does_not_keep_the_callers_engine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    import_module: Callable[[str], ModuleType],
    is_kept: bool,
) -> None:
    lines = [
        "try:",
        "    import absent_for_ever",
        "except ImportError as error:",
        "    KEPT = error",
    ]
    (tmp_path / "keeps_its_error.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keeps_its_error", raising=False)

    engine = engine_made_after(import_module, "keeps_its_error")
    gc.collect()

    assert (engine() is not None) == is_kept
    assert isinstance(sys.modules.pop("keeps_its_error").KEPT, ImportError)


def test_what_an_import_apart_raises_is_the_callers() -> None:
    with pytest.raises(ModuleNotFoundError, match="absent_for_ever"):
        import_apart("absent_for_ever")
