"""The verdict: findings and an exit status, out of an examination; pure."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rdt_transport.doctor.advice import Finding, advice, causes
from rdt_transport.doctor.examination import Examination, Pair

__all__ = ["Finding", "diagnose", "exit_status", "is_slow"]

UNKNOWN = "unknown"


def is_slow(found: Examination, pair: Pair) -> bool:
    """Whether the reads of ``pair`` go by TCP, or are answered by the source's processor, where
    a faster way should be: within a host always, between two when both have RDMA devices."""
    if pair.reads is None:
        return False
    should_be_fast = (
        pair.peer is None
        or found.is_one_host
        or bool(found.peer_host and found.peer_host.rdma_devices and found.host.rdma_devices)
    )
    carried_slowly = pair.reads.is_emulated or "tcp" in pair.reads.transport.split("+")
    return should_be_fast and carried_slowly


def _of_pair(found: Examination, pair: Pair) -> Iterator[Finding]:
    if pair.reads is None:
        cause = next(causes(found, pair), None)
        yield Finding(
            pair.name,
            "unmeasured",
            pair.error or "nothing was read",
            "reads",
            "" if cause is None else f"maybe {cause.name}={cause.found}: {cause.why}",
            "look at what NIXL and UCX say above" if cause is None else cause.remedy,
        )
        return
    reads = pair.reads
    if not reads.is_equal:
        yield Finding(
            pair.name,
            "slow",
            "other bytes than the source holds",
            "equal bytes",
            "weights would be wrong; nothing may be synced this way",
            "try UCX_TLS without the transport in use, and report it with this output",
        )
    if reads.transport == UNKNOWN:
        yield Finding(
            pair.name,
            "unmeasured",
            "UCX did not say how it reads",
            "its table of protocols",
            "the path in use is not known",
            "run again; look at the speed meanwhile",
        )
    if is_slow(found, pair):
        cause = next(causes(found, pair), None)
        yield Finding(
            pair.name,
            "slow",
            f"{reads.transport}, by {reads.how}",
            _expected(found, pair),
            "UCX found no faster way; no setting known here explains it"
            if cause is None
            else f"{cause.name} is {cause.found}: {cause.why}",
            "set UCX_LOG_LEVEL=info and look at which devices UCX skips"
            if cause is None
            else cause.remedy,
        )


def _expected(found: Examination, pair: Pair) -> str:
    if pair.peer is not None and not found.is_one_host:
        return "RDMA"
    return "cuda_ipc" if pair.is_of_gpus else "cma"


def diagnose(found: Examination) -> tuple[Finding, ...]:
    """All findings, the worst first; every pair that is slow or was not measured is in one."""
    findings: list[Finding] = []
    if found.agent_error is not None:
        tls = found.setting("UCX_TLS")
        findings.append(
            Finding(
                "agent",
                "unmeasured",
                found.agent_error,
                f"an agent with backend {found.backend}",
                "nothing can be read without one"
                + (f"; UCX_TLS is {tls.value}, which may leave too little" if tls.value else ""),
                "unset UCX_TLS" if tls.value else "pip install 'nixl>=1.5,<2'; look at its log",
            )
        )
    findings += _merged(each for pair in found.pairs for each in _of_pair(found, pair))
    findings += advice(found)
    order = ("slow", "unmeasured", "advice")
    return tuple(sorted(findings, key=lambda each: order.index(each.severity)))


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ by their pair alone, as one with all names: GPUs make many pairs."""
    names: dict[Finding, list[str]] = {}
    for each in findings:
        names.setdefault(replace(each, name=""), []).append(each.name)
    return [replace(each, name=", ".join(pairs)) for each, pairs in names.items()]


def exit_status(findings: Iterable[Finding]) -> int:
    """1 when a pair is slow (or wrong), else 2 when something was not measured, else 0."""
    severities = {each.severity for each in findings}
    return 1 if "slow" in severities else 2 if "unmeasured" in severities else 0
