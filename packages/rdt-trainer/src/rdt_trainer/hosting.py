"""Where a job's rendezvous comes from: given, hosted by rank 0, or learnt from rank 0."""

import ipaddress
import secrets
import uuid
from collections.abc import Callable
from contextlib import suppress

import torch

from rdt_trainer.errors import SettingsError, TrainerStateError
from rdt_trainer.ranks import gather_from_ranks, group_size
from rdt_transport.rendezvous import (
    JobSettings,
    LocalHost,
    RendezvousAddress,
    RendezvousClient,
    RendezvousEvent,
    host_local,
)

__all__ = ["Hosting"]


class Hosting:
    """One rank's access to the rendezvous.

    Without an address rank 0 hosts one, in this process or in a Ray actor, and tells the other
    ranks over ``torch.distributed``'s default group, whose ranks must be the producers'. There all
    ranks wait for each other, so a rank that cannot `open` says so by `refuse`.
    """

    def __init__(
        self,
        rank: int,
        settings: JobSettings,
        given: RendezvousAddress | None,
        *,
        ray: str | None,
        job: str | None,
        host: str,
    ) -> None:
        if given is not None and ray is not None:
            raise SettingsError("both rendezvous= and ray= were given: expected one of them")
        if given is None and ray is None and _is_anywhere(host):
            raise SettingsError(
                f"host is {host}, where anybody can listen and nobody can connect to: expected an "
                "address of this node that workers reach, as they are told it"
            )
        self._rank = rank
        self._settings = settings
        self._address = given
        self._ray = ray
        self._job = job or f"rdt-{uuid.uuid4().hex[:12]}"
        self._listen = host
        self._local: LocalHost | None = None
        self._end: Callable[[], None] | None = None

    @property
    def address(self) -> RendezvousAddress:
        """Raises `TrainerStateError` before `open`, unless the address was given."""
        if self._address is None:
            raise TrainerStateError("the rendezvous is not open yet: call init() first")
        return self._address

    def open(self, kind: str = "cpu") -> RendezvousAddress:
        """Host, find or take the rendezvous; a collective where it is neither given nor alone.

        Args:
            kind: of device that this rank serves from; see `JobSettings.for_device`.

        Raises:
            SettingsError: the group's ranks are not the producers'.
            RdtTransportError: this rank could not host.
            RankFailedError: another rank could not host, or refused.
        """
        if self._address is None:
            self._settings = self._settings.for_device(kind)
            if self._settings.num_producers == 1:
                self._address = self._host()
            elif group_size() != self._settings.num_producers:
                raise self._wrong_group()
            else:
                self._address = gather_from_ranks(self._host_or_learn)[0]
        return self.address

    def connect(
        self, on_event: Callable[[RendezvousEvent], None] | None = None
    ) -> RendezvousClient:
        """A client of it, without a socket where it is hosted in this process."""
        if self._local is not None:
            return self._local.connect(on_event)
        return RendezvousClient(self.address, on_event=on_event)

    def refuse(self, error: Exception) -> None:
        """Take this rank's part in `open` with an error: the other ranks raise it.

        Does nothing where `open` is not a collective. Returns once all ranks know.
        """

        def fail() -> RendezvousAddress:
            raise error

        shared = self._address is None and self._settings.num_producers > 1
        if shared and group_size() == self._settings.num_producers:
            with suppress(Exception):  # the caller raises its own
                gather_from_ranks(fail)

    def close(self) -> None:
        """End the rendezvous if it is hosted here. Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def _host_or_learn(self) -> RendezvousAddress | None:
        if torch.distributed.get_rank() != self._rank:
            raise self._wrong_group()
        return self._host() if self._rank == 0 else None

    def _host(self) -> RendezvousAddress:
        token = secrets.token_hex(32)
        if self._ray is None:
            host = self._local = host_local(self._job, token, self._settings, self._listen)
        else:
            from rdt_transport.rendezvous.ray_host import host_in_ray

            host = host_in_ray(self._job, token, self._settings, ray_address=self._ray)
        self._end = host.close
        return host.address

    def _wrong_group(self) -> SettingsError:
        found = "torch.distributed is not initialised"
        if (world_size := group_size()) is not None:
            found = f"torch.distributed's rank is {torch.distributed.get_rank()} of {world_size}"
        return SettingsError(
            f"rank {self._rank} of {self._settings.num_producers} cannot learn where rank 0 hosts "
            f"the rendezvous: {found}; host one with rdt_transport.rendezvous.host_local and pass "
            "its address as rendezvous= on every rank"
        )


def _is_anywhere(host: str) -> bool:
    """Whether it stands for all addresses of a node, as 0.0.0.0 does."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name
