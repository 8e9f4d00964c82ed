"""The backend "rdt" of vLLM's own trainer interface; the only module here that imports vLLM.

Importing it registers the backend with ``WeightTransferTrainerFactory``, so that a script written
for ``sharded_rdt`` keeps its source, its client and its calls. Nothing in this package imports it.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.clients import (
    HTTPVLLMWeightSyncClient,
    RayVLLMWeightSyncClient,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rdt_trainer.client import Client
from rdt_trainer.engine import RdtTrainer
from rdt_trainer.errors import SettingsError
from rdt_trainer.four_calls import FourCallsClient
from rdt_trainer.http_client import HttpClient
from rdt_trainer.live_consumers import LiveDeployments, live_deployments
from rdt_trainer.ranks import gather_from_ranks, group_size
from rdt_trainer.ray_client import RayClient
from rdt_trainer.report import SyncReport
from rdt_transport.rendezvous import JobSettings

__all__ = ["RdtTrainerInitInfo", "RdtTrainerWeightTransferEngine"]


@dataclass
class RdtTrainerInitInfo(TrainerInitInfo):
    """What `RdtTrainer` is made with, under the names that ``sharded_rdt`` has for it.

    Equal on every rank but for ``rank``, which is the default process group's.

    Attributes:
        num_consumers: workers of the whole fleet; 0 lets every deployment tell its own.
        workers_per_replica: workers of one deployment, where all have as many; 0 divides
            ``num_consumers`` among the clients.
        trainer_actor_namespace: accepted, and not needed: no actor is looked up.
        num_rdt_buffers: slots of every ring, on both sides.
        buffer_presize_gb: accepted, and not needed: slots are as large as the plan's chunks.
        gather_lookahead: groups gathered ahead of the one being read.
        stall_timeout_s: seconds of each single wait, also of a call to an actor; longer than a
            whole sync takes. A client over HTTP has its own.
        max_chunk_bytes: cap of one chunk, hence of one slot; None is `JobSettings`' own.
        device: where the source's tensors are. None: where its stable tensors are, or the
            accelerator, or the CPU where there is none.
        host: where rank 0's rendezvous listens. None: this node's address in Ray, where Ray is
            initialised, or else the loopback.
        unconsumed: patterns of names that no worker needs to read.
        serve_local: of a source that has both, serve ``iter_local`` and not ``iter_full``: each
            rank its own shards, without a gather.
    """

    backend: ClassVar[str] = "rdt"

    num_consumers: int = 0
    workers_per_replica: int = 0
    trainer_actor_namespace: str | None = None
    num_rdt_buffers: int = 2
    buffer_presize_gb: float = 0.0
    gather_lookahead: int = 1
    stall_timeout_s: float = 300.0
    max_chunk_bytes: int | None = None
    device: str | None = None
    host: str | None = None
    unconsumed: Sequence[str] = ()
    serve_local: bool = False

    @classmethod
    def of(cls, init_info: TrainerInitInfo) -> "RdtTrainerInitInfo":
        """``init_info``, or what another backend's has in common with ours."""
        if isinstance(init_info, cls):
            return init_info
        known = (each.name for each in fields(cls))
        return cls(**{name: getattr(init_info, name) for name in known if hasattr(init_info, name)})

    def settings(self, num_producers: int, num_replicas: int) -> JobSettings:
        """What the whole job agrees on."""
        return JobSettings(
            num_producers,
            num_replicas,
            num_slots=self.num_rdt_buffers,
            lookahead=self.gather_lookahead,
            max_chunk_bytes=self.max_chunk_bytes,
        )


class RdtTrainerWeightTransferEngine(TrainerWeightTransferEngine[RdtTrainerInitInfo]):
    """`RdtTrainer` behind vLLM's trainer interface; made by `trainer_init`, on every rank.

    Attributes:
        trainer: the trainer itself, for all that the interface has no word for.
    """

    init_info_cls = RdtTrainerInitInfo

    def __init__(
        self, *, client: Any, source: Any, init_info: RdtTrainerInitInfo, is_sender: bool = True
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.rank = init_info.rank
        self._num_consumers = init_info.num_consumers
        self._live: LiveDeployments | None = None
        num_producers = _num_producers(self.rank)
        clients: list[Client] = []

        def count() -> int:
            clients.extend(_clients(client, init_info) if is_sender else ())
            return len(clients)

        num_replicas = count() if num_producers == 1 else gather_from_ranks(count)[0]
        self._clients, self._num_deployments = clients, num_replicas
        self.trainer = RdtTrainer(
            _LocalOnly(source) if init_info.serve_local else source,
            clients,
            rank=self.rank,
            settings=init_info.settings(num_producers, num_replicas),
            host=init_info.host or _own_address(),
            device=init_info.device or _accelerator(source),
            timeout_seconds=init_info.stall_timeout_s,
            unconsumed=init_info.unconsumed,
        )

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInitInfo, *, client: Any, source: Any | None = None
    ) -> Self:
        """Attach every deployment's workers; blocks until they have recorded their plans.

        Args:
            init_info: a `RdtTrainerInitInfo`, or another backend's, of which the fields with the
                same names are taken.
            client: on rank 0 one of vLLM's clients, any object with its four methods, or one of
                ours; or a list of these, one a deployment. Not looked at on the other ranks.
            source: a weight source of vLLM 0.33, or of 0.32, or one of ours.

        Raises:
            SettingsError: no source, ranks that are not the group's, or counts that do not fit.
            RdtTrainerError, RdtTransportError: as `RdtTrainer.init`.
        """
        if source is None:
            raise SettingsError('the backend "rdt" sends the weights of a source: expected source=')
        info = RdtTrainerInitInfo.of(init_info)
        engine = cls(client=client, source=source, init_info=info, is_sender=info.is_sender)
        engine.trainer.init()
        if info.is_sender:
            engine._live = LiveDeployments(engine.trainer, engine._clients)
        return engine

    def send_weights(  # pyrefly: ignore[bad-override]
        self, live_consumer_ids: Collection[int] | None = None, *, weight_version: str | None = None
    ) -> SyncReport:
        """As `RdtTrainer.send_weights`, on every rank.

        ``live_consumer_ids``, the same on every rank, names the consumers that take part: all of
        each deployment that does. The others are detached, and attached again, as replicas of new
        numbers, by the next call that names them or leaves it out. Nobody need give it: a
        deployment that is gone is dropped without being told, and attached when it is back.

        Raises `SettingsError` for numbers that are no deployment's consumers, on every rank.
        """
        live = frozenset(range(self._num_deployments))
        if live_consumer_ids is not None:
            live = live_deployments(live_consumer_ids, self._num_consumers, len(live))
        if self._live is not None:
            self._live.set(live)
        return self.trainer.send_weights(weight_version)

    def shutdown(self) -> None:
        """Detach the servers' workers, then end the job; idempotent."""
        self.trainer.close()


class _LocalOnly:
    """A source without its ``iter_full``."""

    def __init__(self, source: Any) -> None:
        self.iter_local = source.iter_local
        self._source = source

    @property
    def metadata(self) -> Sequence[Any]:
        return self._source.metadata


def _num_producers(rank: int) -> int:
    """Ranks of the default process group, one where there is none; as ``sharded_rdt`` counts."""
    num_ranks = group_size()
    if num_ranks is not None and torch.distributed.get_rank() != rank:
        raise SettingsError(
            f"TrainerInitInfo.rank is {rank}, and this process is rank "
            f"{torch.distributed.get_rank()} of {num_ranks} in the default process group: expected "
            "equal numbers, as the owners of a source's parameters are these ranks"
        )
    return num_ranks or 1


def _clients(given: Any, info: RdtTrainerInitInfo) -> list[Client]:
    """One client of ours for each deployment."""
    several = isinstance(given, Sequence)
    each = info.workers_per_replica
    found = [part for one in (given if several else [given]) for part in _split(one, info)]
    if not found:
        raise SettingsError("client is an empty list: expected a client for each deployment")
    if not each and info.num_consumers:
        each, rest = divmod(info.num_consumers, len(found))
        if rest:
            raise SettingsError(
                f"num_consumers is {info.num_consumers} for {len(found)} deployments: expected as "
                "many workers in each; leave it 0 where they differ, and every deployment tells"
            )
    if info.num_consumers and each * len(found) != info.num_consumers:
        raise SettingsError(
            f"num_consumers is {info.num_consumers} and workers_per_replica {each}, which is "
            f"{info.num_consumers / each:g} deployments, and there are clients for {len(found)}: "
            "expected a client for each deployment; pass them as a list"
        )
    return [_client(one, each, info.stall_timeout_s) for one in found]


def _split(client: Any, info: RdtTrainerInitInfo) -> list[Any]:
    """vLLM's Ray client may hold several deployments, an engine each: these are clients each."""
    each = info.workers_per_replica
    if type(client) is RayVLLMWeightSyncClient and each and info.num_consumers > each:
        if len(client.handles) * each == info.num_consumers:
            return [RayVLLMWeightSyncClient(handle) for handle in client.handles]
    return [client]


def _client(client: Any, num_workers: int, timeout_seconds: float) -> Client:
    """Ours for it: of vLLM's own clients the same address, of any other object its four calls.

    A class that extends one of vLLM's may send more than that does, so it is called as it is.
    """
    if type(client) is HTTPVLLMWeightSyncClient:
        silence = timeout_seconds if client.timeout is None else client.timeout
        return HttpClient(client.base_url, num_workers=num_workers, timeout_seconds=silence)
    if type(client) is RayVLLMWeightSyncClient:
        return RayClient(client.handles, num_workers=num_workers, timeout_seconds=timeout_seconds)
    if hasattr(client, "init_weight_transfer_engine"):
        return FourCallsClient(client, num_workers=num_workers)
    if not hasattr(client, "init"):
        raise SettingsError(
            f"client is {client!r} on rank 0: expected one of vLLM's clients, an object with its "
            "four methods, one of rdt_trainer's, or a list of these"
        )
    return client


def _own_address() -> str:
    """Where workers find this process: on its node in Ray, or on this host alone."""
    ray = sys.modules.get("ray")  # a script that uses Ray has imported it
    if ray is not None and ray.is_initialized():
        return ray.util.get_node_ip_address()
    return "127.0.0.1"


def _accelerator(source: Any) -> str | None:
    """Where a source yields its tensors that does not show any: the accelerator, if there is one.

    None for one that has stable tensors, as these show it.
    """
    if callable(getattr(source, "stable_tensors", None)) or not torch.accelerator.is_available():
        return None
    return str(torch.accelerator.current_accelerator())


WeightTransferTrainerFactory.register_engine(
    RdtTrainerInitInfo.backend, RdtTrainerWeightTransferEngine
)
