"""The verdict, without measuring anything: tables of what must be said, and what always holds."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_transport.doctor import as_json, as_text, diagnose, exit_status
from rdt_transport.doctor.examination import (
    Examination,
    HostFacts,
    Memory,
    Origin,
    Pair,
    Reads,
    Setting,
)
from rdt_transport.doctor.verdict import is_slow

FAST = Reads("cma", "zero-copy", False, True, 1e-4, 5e9, 1e10)
EMULATED = replace(FAST, transport="tcp", how="software emulation", is_emulated=True)
CPU = Pair("cpu", "cpu", reads=FAST)
GPU = Pair("cuda:0", "cuda:1", reads=replace(FAST, transport="cuda_ipc"))
GET_ZCOPY = Setting("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y", "rdt")
HOST = HostFacts(
    boot_id="here", can_ptrace=True, ptrace_scope=0, huge_pages="madvise", shm_bytes=8 << 30
)
GPU_HOST = replace(HOST, num_gpus=2)
RDMA_HOST = replace(HOST, rdma_devices=("mlx5_0",), has_uverbs=True)
WELL = Examination({"ucx": "1.23.0"}, HOST, pairs=(CPU,), idle_cores=0.002)
GPUS_WELL = replace(WELL, host=GPU_HOST, pairs=(CPU, GPU), settings=(GET_ZCOPY,))


def with_setting(found: Examination, name: str, value: str, origin: Origin = "user"):
    others = [each for each in found.settings if each.name != name]
    return replace(found, settings=(*others, Setting(name, value, origin)))


def slowed(found: Examination) -> Examination:
    pairs = (replace(pair, reads=EMULATED) for pair in found.pairs)
    return replace(found, pairs=tuple(pairs))


@pytest.mark.parametrize("found", [WELL, GPUS_WELL, replace(WELL, host=RDMA_HOST)])
def test_a_machine_without_fault_has_no_findings(found: Examination) -> None:
    assert diagnose(found) == ()
    assert exit_status(()) == 0


REFUSED = replace(CPU, reads=EMULATED, copy_refusal="EPERM: Operation not permitted")
YAMA_HOST = replace(HOST, ptrace_scope=1, can_ptrace=False)


@pytest.mark.parametrize(
    ("found", "cause", "remedy"),
    [
        (with_setting(slowed(WELL), "UCX_TLS", "tcp"), "UCX_TLS is tcp", "unset UCX_TLS"),
        (with_setting(slowed(WELL), "UCX_TLS", "^cma"), "UCX_TLS is ^cma", "unset UCX_TLS"),
        (
            replace(WELL, pairs=(REFUSED,), host=YAMA_HOST),
            "kernel.yama.ptrace_scope is 1",
            "kernel.yama.ptrace_scope=0",
        ),
        (replace(WELL, pairs=(REFUSED,)), "CMA is EPERM", "--cap-add=SYS_PTRACE"),
        (slowed(WELL), "no setting known", "UCX_LOG_LEVEL"),
        (
            with_setting(slowed(GPUS_WELL), "UCX_TLS", "cma,tcp"),
            "leaves out cuda_ipc",
            "add cuda_ipc",
        ),
        (
            with_setting(slowed(GPUS_WELL), GET_ZCOPY.name, "n"),
            "UCX_CUDA_IPC_ENABLE_GET_ZCOPY is n",
            "set it to y",
        ),
        (replace(slowed(GPUS_WELL), settings=()), "ENABLE_GET_ZCOPY is unset", "set it to y"),
        (
            with_setting(
                slowed(GPUS_WELL), "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments : True"
            ),
            "cannot be registered",
            "leave expandable_segments out",
        ),
    ],
)
def test_a_slow_pair_within_a_host_has_status_1_with_its_cause_and_remedy(
    found: Examination, cause: str, remedy: str
) -> None:
    findings = diagnose(found)

    assert exit_status(findings) == 1
    slow = [each for each in findings if each.severity == "slow"]
    assert any(cause in each.why and remedy in each.remedy for each in slow), slow
    assert sum(each.name.count("<-") for each in slow) == len(found.pairs)


FAR = replace(CPU, peer="far:1", reads=EMULATED)
FAR_RDMA = replace(RDMA_HOST, boot_id="there")


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        (RDMA_HOST, FAR_RDMA, 1),
        (RDMA_HOST, replace(HOST, boot_id="there"), 0),
        (HOST, FAR_RDMA, 0),
        (HOST, HOST, 1),  # two doctors on one host
        (replace(HOST, boot_id=""), replace(HOST, boot_id=""), 0),  # nobody knows
    ],
)
def test_tcp_between_hosts_is_slow_when_both_have_rdma(
    here: HostFacts, there: HostFacts, expected: int
) -> None:
    found = replace(WELL, host=here, peer_host=there, pairs=(CPU, FAR))

    assert exit_status(diagnose(found)) == expected


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (with_setting(WELL, "UCX_NET_DEVICES", "eth0"), "UCX_NET_DEVICES is eth0"),
        (with_setting(WELL, "UCX_NET_DEVICES", ""), "UCX_NET_DEVICES is set, and empty"),
        (with_setting(WELL, "UCX_TLS", "tcp,cma"), "UCX_TLS is tcp,cma"),
        (with_setting(WELL, "UCX_TLS", "^ib"), "UCX_TLS is ^ib"),
        (replace(WELL, host=replace(RDMA_HOST, has_uverbs=False)), "/dev/infiniband is"),
        (replace(WELL, host=replace(RDMA_HOST, memlock_bytes=1 << 16)), "memlock is 65536"),
    ],
)
def test_what_keeps_rdma_from_carrying_reads_is_named(found: Examination, cause: str) -> None:
    host = found.host if found.host.rdma_devices else RDMA_HOST
    findings = diagnose(replace(found, host=host, peer_host=FAR_RDMA, pairs=(CPU, FAR)))

    (slow,) = (each for each in findings if each.severity == "slow")
    assert slow.name == "cpu <- cpu of far:1"
    assert slow.expected == "RDMA"
    assert cause in slow.why


@pytest.mark.parametrize("value", ["^ud", "rc,cma", "all", "ib,sm", "^tcp"])
def test_what_leaves_rdma_and_cma_is_not_blamed(value: str) -> None:
    found = with_setting(replace(WELL, host=RDMA_HOST), "UCX_TLS", value)

    assert diagnose(found) == ()


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (replace(WELL, host=replace(HOST, huge_pages="never")), "huge pages"),
        (replace(WELL, host=replace(HOST, shm_bytes=64 << 20)), "/dev/shm"),
        (replace(WELL, idle_cores=1.0), "idle agent"),
        (replace(WELL, memory=(Memory("cpu", 99),), ring_bytes=100), "memory of cpu"),
        (with_setting(WELL, "PYTORCH_ALLOC_CONF", "expandable_segments:True"), "PYTORCH_ALLOC"),
    ],
)
def test_advice_alone_has_status_0(found: Examination, name: str) -> None:
    (finding,) = diagnose(found)

    assert name in finding.name
    assert finding.severity == "advice"
    assert exit_status([finding]) == 0


def test_rings_that_fit_and_sizes_nobody_knows_are_no_findings() -> None:
    for free in (100, None):
        assert diagnose(replace(WELL, memory=(Memory("cpu", free),), ring_bytes=100)) == ()


@pytest.mark.parametrize(
    "found",
    [
        replace(WELL, pairs=(replace(CPU, reads=None, error="no answer within 1 s"),)),
        replace(WELL, pairs=(replace(CPU, reads=replace(FAST, transport="unknown")),)),
        with_setting(replace(WELL, agent_error="NIXL_ERR_BACKEND", pairs=()), "UCX_TLS", "self"),
    ],
)
def test_what_was_not_measured_has_status_2(found: Examination) -> None:
    assert exit_status(diagnose(found)) == 2


def test_an_agent_that_does_not_come_up_blames_the_users_ucx_tls() -> None:
    found = with_setting(replace(WELL, agent_error="NIXL_ERR_BACKEND"), "UCX_TLS", "posix,self")

    (finding,) = (each for each in diagnose(found) if each.name == "agent")
    assert "UCX_TLS is posix,self" in finding.why
    assert finding.remedy == "unset UCX_TLS"


def test_what_rdt_had_no_chance_to_set_is_no_advice() -> None:
    found = replace(GPUS_WELL, agent_error="NIXL_ERR_BACKEND", settings=(), pairs=())

    assert [each.name for each in diagnose(found)] == ["agent"]


def test_wrong_bytes_are_never_well() -> None:
    found = replace(WELL, pairs=(replace(CPU, reads=replace(FAST, is_equal=False)),))

    assert exit_status(diagnose(found)) == 1


def test_pairs_of_one_fault_share_a_finding() -> None:
    gpus = [replace(GPU, reader=f"cuda:{number}", reads=EMULATED) for number in range(8)]
    findings = diagnose(replace(GPUS_WELL, pairs=tuple(gpus)))

    (slow,) = (each for each in findings if each.severity == "slow")
    assert slow.name == ", ".join(pair.name for pair in gpus)


reads = st.builds(
    Reads,
    st.sampled_from(["cma", "tcp", "cuda_ipc", "rc_mlx5", "rc_mlx5+tcp", "unknown"]),
    st.sampled_from(["zero-copy", "software emulation"]),
    *(st.booleans(), st.booleans()),
    *(st.floats(1e-6, 1.0), st.floats(1e6, 1e12), st.floats(1e6, 1e12)),
)
devices = st.sampled_from(["cpu", "cuda:0", "cuda:1"])
pairs = st.builds(
    Pair,
    devices,
    devices,
    st.none() | st.just("far:1"),
    st.none() | reads,
    st.none() | st.just("lost"),
    st.none() | st.just("EPERM: no"),
)
hosts = st.builds(
    HostFacts,
    st.sampled_from(["", "here", "there"]),
    st.none() | st.booleans(),
    st.none() | st.integers(0, 3),
    st.sampled_from([None, "always", "madvise", "never"]),
    st.none() | st.integers(0, 1 << 40),
    st.none() | st.integers(0, 1 << 40),
    st.sampled_from([(), ("mlx5_0",)]),
    st.booleans(),
    st.integers(0, 2),
)
variables = st.builds(
    Setting,
    st.sampled_from(
        ["UCX_TLS", "UCX_NET_DEVICES", GET_ZCOPY.name, "PYTORCH_ALLOC_CONF"],
    ),
    st.none() | st.sampled_from(["", "tcp", "^cma", "all", "y", "n", "expandable_segments:True"]),
    st.sampled_from(["user", "rdt", "too late", "doctor", "nobody"]),
)
examinations = st.builds(
    Examination,
    st.just({}),
    hosts,
    agent_error=st.none() | st.just("no"),
    pairs=st.lists(pairs, max_size=4).map(tuple),
    idle_cores=st.none() | st.floats(0, 2),
    memory=st.lists(st.builds(Memory, devices, st.none() | st.integers(0)), max_size=2).map(tuple),
    settings=st.lists(variables, max_size=4, unique_by=lambda each: each.name).map(tuple),
    peer_host=st.none() | hosts,
    ring_bytes=st.none() | st.integers(1),
)


@given(examinations)
def test_every_finding_says_what_to_do_and_the_status_follows_from_the_pairs(found) -> None:
    findings = diagnose(found)

    for each in findings:
        assert each.name and each.found and each.expected and each.remedy
    named = {
        severity: {
            name for each in findings if each.severity == severity for name in each.name.split(", ")
        }
        for severity in ("slow", "unmeasured")
    }
    slow = {p.name for p in found.pairs if p.reads and (is_slow(found, p) or not p.reads.is_equal)}
    lost = {p.name for p in found.pairs if not p.reads or p.reads.transport == "unknown"}
    assert named["slow"] == slow
    assert named["unmeasured"] - {"agent"} == lost
    expected = 1 if slow else 2 if lost or found.agent_error else 0
    assert exit_status(findings) == expected
    assert json.loads(json.dumps(as_json(found, findings)))["exit_status"] == expected
    text = as_text(found, findings)
    assert all(f"{each.severity.upper()}: {each.name}" in text for each in findings)
