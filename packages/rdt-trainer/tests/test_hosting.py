from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from rdt_plan import Manifest, ParamMeta, ProducerRecord
from rdt_plan.records import Sources
from rdt_trainer import ModuleSource, RdtTrainer
from rdt_trainer.errors import RdtTrainerError, SettingsError, TrainerStateError
from rdt_trainer.hosting import Hosting
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.errors import RdtTransportError, RendezvousError
from rdt_transport.rendezvous import JobSettings, RendezvousAddress, RendezvousClient
from rdt_transport.wire.nixl import NixlWire

NEVER_SECONDS = 120.0
ALONE, PAIR = JobSettings(num_producers=1), JobSettings(num_producers=2)
GIVEN = RendezvousAddress("h", 1, "j", "t")


def hosting(rank=0, settings=ALONE, given=None, **options) -> Hosting:
    return Hosting(
        rank, settings, given, **{"ray": None, "job": None, "host": "127.0.0.1", **options}
    )


def test_rank_0_hosts_until_closed():
    host = hosting(job="mine")
    with pytest.raises(TrainerStateError, match="call init"):
        _ = host.address
    address = host.open()
    assert address.job == "mine"
    assert host.open() == address
    with RendezvousClient(address) as client:
        assert client.subscriptions(10) == []
    host.close()
    host.close()
    with pytest.raises(RendezvousError):
        RendezvousClient(address)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("cpu", ALONE, 64 << 20),
        ("cuda", ALONE, 1 << 30),
        ("cuda", replace(ALONE, max_chunk_bytes=9), 9),
    ],
)
def test_the_job_that_is_hosted_has_chunks_that_suit_the_device(kind, settings, expected):
    manifest = Manifest.build([ParamMeta("w", "int8", (1,))])
    host = hosting(settings=settings)
    with RendezvousClient(host.open(kind)) as client:
        record = ProducerRecord(0, "00" * 16, "p", b"", manifest.digest, Sources.of([]))
        client.publish(record, manifest, NEVER_SECONDS)
        assert client.job(NEVER_SECONDS).max_chunk_bytes == expected
    host.close()


def test_every_job_has_a_name_and_a_token_of_its_own():
    first, second = hosting(), hosting()
    try:
        one, other = first.open(), second.open()
        assert one.job != other.job
        assert one.token != other.token
        assert len(one.token) >= 32
    finally:
        first.close()
        second.close()


def test_a_given_address_is_taken_and_left_alone():
    host = hosting(rank=1, settings=PAIR, given=GIVEN)
    assert host.open() is GIVEN
    host.close()
    assert host.address is GIVEN


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_of_all_is_one_that_no_worker_reaches(host):
    with pytest.raises(SettingsError, match=f"host is {host}, .* that workers reach"):
        hosting(host=host)
    assert hosting(host=host, given=GIVEN).open() is GIVEN


def test_an_address_and_ray_exclude_each_other():
    with pytest.raises(SettingsError, match="both rendezvous= and ray="):
        hosting(given=GIVEN, ray="auto")


@pytest.mark.parametrize("rank", [0, 1])
def test_several_ranks_need_a_way_to_share_the_address(rank):
    with pytest.raises(SettingsError, match=f"rank {rank} of 2 cannot learn.*host_local"):
        hosting(rank=rank, settings=PAIR).open()


def test_rank_0_tells_the_others_over_torch_distributed(tmp_path):
    import torch.multiprocessing as mp

    mp.spawn(_open_as_rank, args=(f"file://{tmp_path}/store", str(tmp_path)), nprocs=2)
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text()


def _open_as_rank(rank: int, init_method: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    host = hosting(rank=rank, settings=PAIR)
    try:
        address = host.open()
        with RendezvousClient(address) as client:
            assert client.subscriptions(10) == []
        with open(f"{folder}/rank{rank}", "w") as file:
            file.write(f"{address} {address.token}")
        torch.distributed.barrier()
    finally:
        host.close()
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_cannot_open_does_not_keep_the_others_waiting(tmp_path, culprit):
    import torch.multiprocessing as mp

    arguments = (f"file://{tmp_path}/store", str(tmp_path), culprit)
    mp.spawn(_fail_to_open_on_a_rank, args=arguments, nprocs=2)
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert said[culprit].startswith("RendezvousError: " if culprit == 0 else "SourceError: ")
    assert said[1 - culprit] == (
        f"RankFailedError: trainer rank {culprit} failed while the job was opened: {said[culprit]}"
    )


def _fail_to_open_on_a_rank(rank: int, init_method: str, folder: str, culprit: int) -> None:
    """Rank 0 has no address to listen on, or rank 1's source is no source."""
    torch.distributed.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    trainer = RdtTrainer(
        ModuleSource(torch.nn.Linear(2, 2)) if rank != culprit or culprit == 0 else object(),
        TorchEngineClient(NixlWire) if rank == 0 else None,
        rank=rank,
        settings=PAIR,
        host="203.0.113.1" if culprit == 0 else "127.0.0.1",
        timeout_seconds=NEVER_SECONDS,
    )
    try:
        with trainer, pytest.raises((RdtTrainerError, RdtTransportError)) as caught:
            trainer.init()
        with open(f"{folder}/rank{rank}", "w") as file:
            file.write(f"{type(caught.value).__name__}: {caught.value}")
    finally:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
