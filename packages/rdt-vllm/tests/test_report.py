"""What makes a report say "exact", and how it says what is not."""

from dataclasses import replace

import pytest

from rdt_vllm.errors import RdtVllmError
from rdt_vllm.testing.report import ExactnessReport, Mismatch, NotExactError, WorkerReport

EXACT = WorkerReport(
    worker=0,
    modules_observed=3,
    bytes_unpacked=100,
    bytes_compared=100,
    live_bytes_compared=20,
    logits_bytes=64,
    logits_digest="ab",
    mismatches=(),
)
SILENT = replace(EXACT, worker=1, logits_bytes=0, logits_digest="")  # leaves logits to worker 0
DIFFERENT = replace(EXACT, mismatches=(Mismatch("norm.weight", 7, "bits differ"),))


@pytest.mark.parametrize(
    ("workers", "ok"),
    [
        ((EXACT, SILENT), True),
        ((SILENT,), False),  # nobody compared logits
        ((), False),
        ((EXACT, DIFFERENT), False),
        ((replace(EXACT, bytes_compared=99),), False),
        ((replace(EXACT, bytes_unpacked=0, bytes_compared=0),), False),
    ],
)
def test_exact_needs_all_bytes_of_all_workers_and_logits(
    workers: tuple[WorkerReport, ...], ok: bool
) -> None:
    report = ExactnessReport(workers, tokens=(1, 2))

    assert report.ok is ok
    if ok:
        assert report.require() is report
    else:
        with pytest.raises(NotExactError) as raised:
            report.require()
        assert isinstance(raised.value, RdtVllmError)


def test_it_names_the_worker_the_tensor_and_the_byte() -> None:
    report = ExactnessReport((EXACT, replace(DIFFERENT, worker=1)), tokens=())

    assert "worker 1" in str(report)
    assert "norm.weight from byte 7: bits differ" in str(report)


def test_reports_cross_processes_as_builtin_types() -> None:
    fields = DIFFERENT.to_rpc()

    assert {type(value) for value in fields.values()} <= {int, str, tuple}
    assert all(type(mismatch) is dict for mismatch in fields["mismatches"])
    assert WorkerReport.from_rpc(fields) == DIFFERENT
