"""What a trainer refuses, and what its errors advise."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from rdt_trainer import (
    JobSettings,
    RdtTrainer,
    SourceError,
    SourceMeta,
    SyncFailedError,
    TrainerStateError,
)
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.errors import DisagreementError, RendezvousTimeoutError
from rdt_transport.rendezvous import host_local
from rdt_transport.wire.base import Wire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

MakeWire = Callable[[str], Wire]


@pytest.fixture
def make_wire() -> MakeWire:
    fabric = InProcessFabric()
    return lambda role: InProcessWire(fabric, role)


class Source:
    """Three layers of one tensor each; ``passes`` makes an iterator of a pass out of them."""

    def __init__(self) -> None:
        self.tensors = {f"layers.{layer}.w": torch.full((4, 2), layer + 1.0) for layer in range(3)}
        self.passes: Callable[[], Iterator] = lambda: iter(self.tensors.items())

    @property
    def metadata(self) -> list[SourceMeta]:
        return [SourceMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.passes()


def trainer(source: Source, client: TorchEngineClient | None, make_wire: MakeWire, **options):
    options.setdefault("timeout_seconds", 20.0)
    return RdtTrainer(source, client, make_wire=lambda: make_wire("producer"), **options)


def assert_heals(rdt: RdtTrainer, source: Source, client: TorchEngineClient) -> None:
    source.passes = lambda: iter(source.tensors.items())
    rdt.send_weights()
    for name, tensor in source.tensors.items():
        assert torch.equal(client.workers[0][name], tensor)


def test_a_source_without_end_is_refused(make_wire):
    source, client = Source(), TorchEngineClient(make_wire)
    # Bounded, so that a trainer that iterates on fails rather than hangs.
    source.passes = lambda: (
        item if i < 50 else pytest.fail("iterated on")
        for i, item in enumerate(itertools.cycle(source.tensors.items()))
    )
    yielded = []
    endless = source.passes

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for item in endless():
            yielded.append(item[0])
            yield item

    source.passes = counted
    with trainer(source, client, make_wire) as rdt:
        rdt.init()
        with pytest.raises(SourceError, match=r"yielded layers\.0\.w after its last declared"):
            rdt.send_weights()
        assert len(yielded) == 4
        assert_heals(rdt, source, client)


@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_a_source_that_reuses_its_buffer_is_refused(make_wire, lookahead):
    source, client = Source(), TorchEngineClient(make_wire)
    buffer = torch.empty(4, 2)
    source.passes = lambda: ((n, buffer.copy_(t)) for n, t in source.tensors.items())
    settings = JobSettings(num_producers=1, lookahead=lookahead)
    with trainer(source, client, make_wire, settings=settings) as rdt:
        rdt.init()
        with pytest.raises(SourceError, match=r"layers\.0\.w.* changed in place.*stay unchanged"):
            rdt.send_weights()
        assert client.weight_version is None
        assert_heals(rdt, source, client)


def test_a_change_while_consumers_read_is_refused(make_wire):
    """As by an optimizer that steps in another thread.

    With one slot, the last chunk is read only after the one before was installed.
    """
    source = Source()

    def change(worker: int, chunk: object) -> None:
        source.tensors["layers.2.w"].add_(1)

    client = TorchEngineClient(make_wire, before_scatter=change)
    settings = JobSettings(num_producers=1, num_slots=1, max_chunk_bytes=8)
    with trainer(source, client, make_wire, settings=settings) as rdt:
        rdt.init()
        with pytest.raises(SourceError, match=r"layers\.2\.w changed in place"):
            rdt.send_weights()
        client._before_scatter = None
        assert_heals(rdt, source, client)


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [("lookahead", 0, 5), ("num_slots", 4, 1), ("max_chunk_bytes", 64, 128)],
)
def test_settings_that_differ_from_the_hosts_are_refused(make_wire, field, theirs, ours):
    hosted = JobSettings(num_producers=1, **{field: theirs})
    mine = JobSettings(num_producers=1, **{field: ours})
    client = TorchEngineClient(make_wire)
    with closing(host_local("job", "token", hosted)) as host:
        with trainer(Source(), client, make_wire, settings=mine, rendezvous=host.address) as rdt:
            message = f"rank 0: JobSettings.{field} is {ours} here, and {theirs} in the job job"
            with pytest.raises(DisagreementError, match=message):
                rdt.init()
    assert client.calls == []


def test_without_its_rendezvous_a_trainer_is_to_be_made_anew(make_wire):
    source, client = Source(), TorchEngineClient(make_wire, timeout_seconds=1)
    host = host_local("dies", "token", JobSettings(num_producers=1))

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        host.close()
        yield from source.tensors.items()

    source.passes = dying
    with trainer(source, client, make_wire, rendezvous=host.address) as rdt:
        rdt.init()
        for _ in range(2):
            with pytest.raises(SyncFailedError, match="make a new trainer"):
                rdt.send_weights()
        with pytest.raises(TrainerStateError, match="make a new trainer"):
            rdt.attach()


# ---- what differs from what was declared: refused by name, and the next sync is whole ------------

ZEROS = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda own: [own[1], own[0], own[2]],
            r"rank 0: .* yielded layers\.1\.w, expected layers\.0\.w: yield .* metadata order",
        ),
        (
            lambda own: [own[0], own[2]],
            r"yielded layers\.2\.w, expected layers\.1\.w: yield .* each .* once",
        ),
        (
            lambda own: own[:2],
            r"rank 0: .* pass ended before layers\.2\.w: expected every parameter .*; yield it",
        ),
        (
            lambda own: [own[0], own[0], *own[1:]],
            r"yielded layers\.0\.w, expected layers\.1\.w: yield .* each .* once",
        ),
        (
            lambda own: [*own, ("layers.3.w", ZEROS)],
            r"rank 0: .* yielded layers\.3\.w after its last .*: expected the end .*; list it",
        ),
        (
            lambda own: [own[0], ("layers.9.w", ZEROS)],
            r"yielded layers\.9\.w, expected layers\.1\.w: .* not in metadata; list it there",
        ),
    ],
    ids=["order", "skipped", "too few", "repeated", "too many", "unknown"],
)
def test_a_pass_that_is_not_as_declared_sends_nothing(make_wire, wrong, message):
    source, client = Source(), TorchEngineClient(make_wire)
    with trainer(source, client, make_wire) as rdt:
        rdt.init()
        rdt.send_weights("good")
        source.passes = lambda: iter(wrong(list(source.tensors.items())))
        with pytest.raises(SourceError, match=message):
            rdt.send_weights("bad")
        assert client.weight_version == "good"
        assert_heals(rdt, source, client)


def test_a_model_that_changes_between_epochs_is_refused(make_wire):
    """The manifest is that of `init`; a source that describes and yields another is not served."""
    source, client = Source(), TorchEngineClient(make_wire)
    before = dict(source.tensors)
    with trainer(source, client, make_wire) as rdt:
        rdt.init()
        rdt.send_weights("good")
        source.tensors["layers.1.w"] = before["layers.1.w"].half()
        with pytest.raises(
            SourceError,
            match=r"rank 0: layers\.1\.w is float16\[4, 2\], expected float32\[4, 2\] as metadata "
            "declared at init; yield it so, or make a new trainer for a model that changed",
        ):
            rdt.send_weights("bad")
        assert client.weight_version == "good"
        source.tensors = before
        assert_heals(rdt, source, client)


# ---- two that disagree ---------------------------------------------------------------------------


def test_a_second_trainer_of_one_job_is_refused_and_disturbs_nobody(make_wire):
    source, client, another = Source(), TorchEngineClient(make_wire), TorchEngineClient(make_wire)
    with trainer(source, client, make_wire, job="one") as rdt:
        rdt.init()
        with trainer(Source(), another, make_wire, rendezvous=rdt.address) as second:
            with pytest.raises(
                DisagreementError,
                match=r"producer 0 is .* alive, and .* claims the same rank; give each trainer its "
                "own job name, or stop the first",
            ):
                second.init()
        assert another.calls == []
        assert_heals(rdt, source, client)


def test_ranks_whose_metadata_differs_are_refused_before_a_server_is_asked(make_wire):
    settings = JobSettings(num_producers=2)
    client = TorchEngineClient(make_wire)
    sources = [Source(), Source()]
    sources[1].tensors["layers.1.w"] = torch.zeros(4, 2, dtype=torch.bfloat16)
    with closing(host_local("job", "token", settings)) as host, ThreadPoolExecutor(2) as pool:

        def run(rank: int) -> None:
            options = {"rank": rank, "settings": settings, "rendezvous": host.address}
            with trainer(
                sources[rank],
                client if rank == 0 else None,
                lambda role: make_wire(f"{role}{rank}"),
                timeout_seconds=2.0 if waits else 20.0,
                **options,
            ) as rdt:
                rdt.init()
                rdt.send_weights()

        waits = True
        calls = [pool.submit(run, rank) for rank in range(2)]
        errors = sorted((each.exception() for each in calls), key=lambda e: type(e).__name__)
        assert [type(e) for e in errors] == [DisagreementError, RendezvousTimeoutError]
        for said in ("layers.1.w", "'float32' on producer 0", "'bfloat16' on producer 1", "equal"):
            assert said in str(errors[0])
        assert "has not published" in str(errors[1])
        assert client.calls == []

        sources[1] = Source()
        waits = False
        assert [each.exception() for each in [pool.submit(run, rank) for rank in range(2)]] == [
            None,
            None,
        ]
        for name, tensor in sources[0].tensors.items():
            assert torch.equal(client.workers[0][name], tensor)
