"""What about a machine costs speed or memory: one small check each, on what was found there."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rdt_transport.doctor.examination import Examination, Pair

__all__ = ["Finding", "Severity", "advice", "causes"]

Severity = Literal["slow", "unmeasured", "advice"]

_NAMES = {
    "cma": {"cma", "sm", "shm", "all"},
    "cuda_ipc": {"cuda_ipc", "cuda", "all"},
    "rc": {
        "rc",
        "rc_x",
        "rc_v",
        "rc_mlx5",
        "rc_verbs",
        "dc",
        "dc_x",
        "dc_mlx5",
        "ib",
        "srd",
        "all",
    },
}
"""The values of UCX_TLS that let UCX use a transport."""
_YES = {"y", "yes", "1", "on", "t", "true"}
_IDLE_CORES = 0.1
_DOCKER_SHM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """Something an operator should know.

    Attributes:
        name: the setting or pair.
        severity: ``slow``: a pair reads along a slow path; ``unmeasured``; ``advice``: no more.
        found: what is.
        expected: what should be.
        why: what it costs, or for a slow pair its cause.
        remedy: what to do.
    """

    name: str
    severity: Severity
    found: str
    expected: str
    why: str
    remedy: str


def _advice(name: str, found: object, expected: str, why: str, remedy: str) -> Finding:
    return Finding(name, "advice", str(found) or "set, and empty", expected, why, remedy)


def _allows(value: str, transport: str) -> bool:
    names = {name.strip() for name in value.removeprefix("^").split(",")}
    if value.startswith("^"):
        family = {"rc": {"ib", "all"}}.get(transport, _NAMES[transport])
        return not names & family
    return bool(names & _NAMES[transport])


def _transports(found: Examination, transport: str) -> Iterator[Finding]:
    setting = found.setting("UCX_TLS")
    if setting.value and not _allows(setting.value, transport):
        what = {"cma": "processes of one host", "cuda_ipc": "GPUs of one host", "rc": "hosts"}
        yield _advice(
            "UCX_TLS",
            setting.value,
            f"unset, or with {transport}",
            f"set by the {setting.origin}, it leaves out {transport}, so reads between "
            f"{what[transport]} fall to TCP",
            f"unset UCX_TLS, or add {transport} to it",
        )


def _kernel_copies(found: Examination, pair: Pair) -> Iterator[Finding]:
    if pair.copy_refusal is None:
        return
    scope = found.host.ptrace_scope
    restricted = scope is not None and scope > 0 and not found.host.can_ptrace
    yield _advice(
        "CMA",
        f"{pair.copy_refusal}; kernel.yama.ptrace_scope is {scope}"
        if restricted
        else pair.copy_refusal,
        "process_vm_readv between processes of one user",
        "the kernel does not let a process copy from another one's memory, so reads fall to TCP",
        "sysctl kernel.yama.ptrace_scope=0, or give the processes CAP_SYS_PTRACE"
        if restricted
        else "run the container with --cap-add=SYS_PTRACE (and a seccomp profile that allows "
        "process_vm_readv), both processes in one PID namespace and of one user",
    )


def _expandable_segments(found: Examination) -> Iterator[Finding]:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = found.setting(name).value or ""
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            yield _advice(
                name,
                value,
                "without expandable_segments",
                "memory of expandable segments cannot be registered: rings on a GPU are refused, "
                "and no tensor is read or written in place, which costs a pack and a scatter",
                f"leave expandable_segments out of {name} in trainer and engine",
            )


def _get_zcopy(found: Examination) -> Iterator[Finding]:
    setting = found.setting("UCX_CUDA_IPC_ENABLE_GET_ZCOPY")
    if (setting.value or "").lower() in _YES or (setting.value is None and found.agent_error):
        return
    yield _advice(
        setting.name,
        setting.value or "unset",
        "y",
        "without it, reads between GPUs of one host that have no NVLink, and of one GPU by two "
        "processes, fall to TCP",
        "set it to y, or unset it: rdt then sets it",
    )


def _net_devices(found: Examination) -> Iterator[Finding]:
    setting = found.setting("UCX_NET_DEVICES")
    devices = found.host.rdma_devices
    if setting.value in (None, "all") or not devices:
        return
    if not any(device in (setting.value or "") for device in devices):
        yield _advice(
            setting.name,
            setting.value,
            f"unset, or with one of {', '.join(devices)}",
            "it names no RDMA device, so reads between hosts go over TCP",
            "unset it, or add the RDMA device nearest to the GPU, as mlx5_0:1",
        )


def _rdma_in_container(found: Examination) -> Iterator[Finding]:
    if found.host.rdma_devices and not found.host.has_uverbs:
        yield _advice(
            "/dev/infiniband",
            "no uverbs device that may be opened",
            f"the devices of {', '.join(found.host.rdma_devices)}",
            "the host has RDMA, but this process cannot use it; reads between hosts go over TCP",
            "pass /dev/infiniband into the container (--device=/dev/infiniband)",
        )


def _locked_memory(found: Examination) -> Iterator[Finding]:
    limit = found.host.memlock_bytes
    if found.host.rdma_devices and limit is not None and limit < (found.ring_bytes or 1 << 62):
        yield _advice(
            "memlock",
            f"{limit} bytes",
            "unlimited, or at least the rings",
            "RDMA locks what it registers, and cannot register more than this",
            "ulimit -l unlimited; in a container --ulimit memlock=-1",
        )


def _huge_pages(found: Examination) -> Iterator[Finding]:
    if found.host.huge_pages == "never":
        yield _advice(
            "huge pages",
            "never",
            "madvise or always",
            "rings in small pages make reads and packs cost more processor time",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _shared_memory(found: Examination) -> Iterator[Finding]:
    size = found.host.shm_bytes
    if size is not None and size <= _DOCKER_SHM_BYTES:
        yield _advice(
            "/dev/shm",
            f"{size} bytes",
            f"more than {_DOCKER_SHM_BYTES} bytes",
            "UCX's channels between processes, Ray's object store and an engine's queues lie there",
            "run the container with --shm-size=8g or --ipc=host",
        )


def _room(found: Examination) -> Iterator[Finding]:
    for memory in found.memory:
        wanted, free = found.ring_bytes, memory.free_bytes
        if wanted is not None and free is not None and free < wanted:
            yield _advice(
                f"memory of {memory.device}",
                f"{free} bytes free",
                f"{wanted} bytes for rings",
                "rings that do not fit are refused at init",
                "lower num_slots or max_chunk_bytes, or free memory",
            )


def _idle(found: Examination) -> Iterator[Finding]:
    if found.idle_cores is not None and found.idle_cores > _IDLE_CORES:
        yield _advice(
            "idle agent",
            f"{found.idle_cores:.2f} of a core",
            f"at most {_IDLE_CORES} of a core",
            "an agent that burns processor time while nothing is synced slows the engine down",
            "look for UCX_ or NIXL_ settings that start progress threads",
        )


def advice(found: Examination) -> tuple[Finding, ...]:
    """Everything worth changing, whether or not a pair suffers from it here."""
    checks = [_huge_pages, _shared_memory, _room, _idle, _expandable_segments]
    findings = [*_transports(found, "cma")]
    findings += [each for pair in found.pairs for each in _kernel_copies(found, pair)][:1]
    if found.host.num_gpus:
        findings += [*_transports(found, "cuda_ipc"), *_get_zcopy(found)]
    if found.host.rdma_devices:
        checks += [_net_devices, _rdma_in_container, _locked_memory]
        findings += _transports(found, "rc")
    return (*findings, *(each for check in checks for each in check(found)))


def causes(found: Examination, pair: Pair) -> Iterator[Finding]:
    """What may have put ``pair`` on a slow path, likeliest first."""
    if pair.peer is not None and not found.is_one_host:
        yield from _transports(found, "rc")
        for check in (_net_devices, _rdma_in_container, _locked_memory):
            yield from check(found)
    elif pair.is_of_gpus:
        yield from _transports(found, "cuda_ipc")
        yield from _expandable_segments(found)
        yield from _get_zcopy(found)
    else:
        yield from _transports(found, "cma")
        yield from _kernel_copies(found, pair)
