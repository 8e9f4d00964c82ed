"""What an examination found, as plain values: the input of `rdt_transport.doctor.verdict`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Examination", "HostFacts", "Memory", "Origin", "Pair", "Reads", "Setting"]

Origin = Literal["user", "rdt", "too late", "doctor", "nobody"]
"""Who set a variable: the user; rdt, before its agent existed; rdt, but in vain, since a process
reads it only once and an agent of somebody else existed already; the doctor, for its own processes
only; nobody."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable as an agent's process has it."""

    name: str
    value: str | None
    origin: Origin


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host, or container, lets its processes do; None where the kernel does not say.

    Attributes:
        boot_id: of the running kernel: equal on two parties of one host.
        can_ptrace: whether this process has CAP_SYS_PTRACE.
        ptrace_scope: Yama's; 0 lets processes of one user read each other.
        huge_pages: ``always``, ``madvise`` or ``never``.
        shm_bytes: size of /dev/shm.
        memlock_bytes: how much memory may be locked; None also when unlimited.
        rdma_devices: names in /sys/class/infiniband.
        has_uverbs: whether /dev/infiniband has a device a process may open.
        num_gpus: that torch sees.
    """

    boot_id: str = ""
    can_ptrace: bool | None = None
    ptrace_scope: int | None = None
    huge_pages: str | None = None
    shm_bytes: int | None = None
    memlock_bytes: int | None = None
    rdma_devices: tuple[str, ...] = ()
    has_uverbs: bool = False
    num_gpus: int = 0


@dataclass(frozen=True, slots=True)
class Reads:
    """Prepared reads of one pair, measured in the reader; medians.

    Attributes:
        transport: as UCX calls it, see `rdt_transport.doctor.ucx_report.ReadPath`; or ``unknown``.
        how: UCX's word for it.
        is_emulated: whether the source's processor answers.
        is_equal: whether the bytes that landed are the source's.
        small_seconds: a read of 4 KiB, from its post until its end was polled.
        bytes_per_second: of a large read.
        copy_bytes_per_second: of a copy of as many bytes within the reader's memory.
    """

    transport: str
    how: str
    is_emulated: bool
    is_equal: bool
    small_seconds: float
    bytes_per_second: float
    copy_bytes_per_second: float

    @property
    def ratio(self) -> float:
        """Read speed over copy speed."""
        return self.bytes_per_second / self.copy_bytes_per_second


@dataclass(frozen=True, slots=True)
class Pair:
    """Who reads from whom, and what was measured; ``error`` says why nothing was.

    Attributes:
        reader: ``cpu`` or ``cuda:0``.
        source: likewise.
        peer: address of the doctor that serves on the other machine; None within this host.
        copy_refusal: why the kernel refuses the reader a copy from the source's memory, as the
            system's error; None when it does not, or was not asked.
    """

    reader: str
    source: str
    peer: str | None = None
    reads: Reads | None = None
    error: str | None = None
    copy_refusal: str | None = None

    @property
    def name(self) -> str:
        return f"{self.reader} <- {self.source}{'' if self.peer is None else f' of {self.peer}'}"

    @property
    def is_of_gpus(self) -> bool:
        """Whether neither end is the host's memory."""
        return "cpu" not in (self.reader, self.source)


@dataclass(frozen=True, slots=True)
class Memory:
    """Free bytes of ``cpu`` or of a GPU; None where nobody says."""

    device: str
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that was found.

    Attributes:
        versions: by distribution, of those that are installed; UCX's as ``ucx``.
        backend: NIXL's plugin.
        agent_error: why no agent came up; None when one did.
        pairs: what was read by whom.
        idle_cores: processor time of an idle agent a second.
        memory: of every device.
        settings: in the environment of an agent's process.
        host: of this machine.
        peer_host: of the other one, when there is one.
        ring_bytes: that rings shall take on each device; None when nobody said.
    """

    versions: Mapping[str, str]
    host: HostFacts
    backend: str = "UCX"
    agent_error: str | None = None
    pairs: tuple[Pair, ...] = ()
    idle_cores: float | None = None
    memory: tuple[Memory, ...] = ()
    settings: tuple[Setting, ...] = ()
    peer_host: HostFacts | None = None
    ring_bytes: int | None = None

    @property
    def is_one_host(self) -> bool:
        """Whether the doctor on "the other machine" runs on this one."""
        there = self.peer_host.boot_id if self.peer_host is not None else ""
        return bool(there) and there == self.host.boot_id

    def setting(self, name: str) -> Setting:
        """The setting of that name; one that nobody set when it was not found."""
        found = [each for each in self.settings if each.name == name]
        return found[0] if found else Setting(name, None, "nobody")
