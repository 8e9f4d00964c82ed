"""What engines are started with; starting and stopping them is in ``test_exactness``."""

import os

import pytest

from rdt_vllm.testing.report import PROBE
from rdt_vllm.testing.serving import engine_arguments, engine_environment


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
