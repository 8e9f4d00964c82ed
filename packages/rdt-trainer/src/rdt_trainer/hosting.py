"""Where a job's rendezvous comes from: given, hosted by rank 0, or learnt from rank 0."""

import secrets
import uuid
from collections.abc import Callable

import torch

from rdt_trainer.errors import SettingsError, TrainerStateError
from rdt_transport.rendezvous import JobSettings, RendezvousAddress, host_local

__all__ = ["Hosting"]


class Hosting:
    """One rank's access to the rendezvous.

    Without an address rank 0 hosts one, in this process or in a Ray actor, and tells the other
    ranks over ``torch.distributed``'s default group, whose ranks must be the producers'.
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
        self._rank = rank
        self._settings = settings
        self._address = given
        self._ray = ray
        self._job = job or f"rdt-{uuid.uuid4().hex[:12]}"
        self._listen = host
        self._end: Callable[[], None] | None = None

    @property
    def address(self) -> RendezvousAddress:
        """Raises `TrainerStateError` before `open`, unless the address was given."""
        if self._address is None:
            raise TrainerStateError("the rendezvous is not open yet: call init() first")
        return self._address

    def open(self) -> RendezvousAddress:
        """Host, find or take the rendezvous; a collective where it is neither given nor alone."""
        if self._address is None:
            shared = self._settings.num_producers > 1
            if shared:
                self._check_group()
            found = [self._host() if self._rank == 0 else None]
            if shared:
                torch.distributed.broadcast_object_list(found, src=0)
            self._address = found[0]
        return self.address

    def close(self) -> None:
        """End the rendezvous if it is hosted here. Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def _host(self) -> RendezvousAddress:
        token = secrets.token_hex(32)
        if self._ray is None:
            host = host_local(self._job, token, self._settings, self._listen)
        else:
            from rdt_transport.rendezvous.ray_host import host_in_ray

            host = host_in_ray(self._job, token, self._settings, ray_address=self._ray)
        self._end = host.close
        return host.address

    def _check_group(self) -> None:
        distributed = torch.distributed
        found = "torch.distributed is not initialised"
        if distributed.is_available() and distributed.is_initialized():
            world_size, mine = distributed.get_world_size(), distributed.get_rank()
            if (world_size, mine) == (self._settings.num_producers, self._rank):
                return
            found = f"torch.distributed's rank is {mine} of {world_size}"
        raise SettingsError(
            f"rank {self._rank} of {self._settings.num_producers} cannot learn where rank 0 hosts "
            f"the rendezvous: {found}; host one with rdt_transport.rendezvous.host_local and pass "
            "its address as rendezvous= on every rank"
        )
