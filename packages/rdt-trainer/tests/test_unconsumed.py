"""Names that no worker anywhere reads: refused when the servers attach, unless they are allowed."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping

import pytest
import torch

from rdt_plan import (
    WIRE_VERSION,
    ConsumerId,
    Manifest,
    ParamMeta,
    Placement,
    Subscription,
    build_plan,
    contiguous_stride,
    whole,
)
from rdt_trainer import RdtTrainer, SourceError, SourceMeta
from rdt_trainer.testing import TorchEngineClient
from rdt_trainer.unconsumed import check_consumed
from rdt_transport.wire.base import Wire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

MakeWire = Callable[[str], Wire]
PARAMS = [
    ParamMeta("embed", "int8", (4,), (0, 1)),
    *(ParamMeta(f"layers.0.{i}", "int8", (4,), (i % 2,)) for i in range(7)),
    ParamMeta("norm", "int8", (0,), (1,)),
]
MANIFEST = Manifest.build(PARAMS)


def copy(param: ParamMeta) -> Placement:
    stride = contiguous_stride(param.shape)
    return Placement(whole(param), "", param.name, 0, param.shape, stride, param.dtype, stride)


def reads(worker: int, names: Collection[str]) -> Subscription:
    """Worker ``worker`` of two, which reads ``names`` whole."""
    writes = [copy(param) for param in PARAMS if param.name in names]
    plan = build_plan(MANIFEST, writes, ConsumerId(0, worker), num_workers=2)
    return Subscription(
        consumer=plan.consumer,
        num_workers=2,
        incarnation="0" * 32,
        wire_name="worker",
        metadata=b"",
        wire_version=WIRE_VERSION,
        plan_digest=plan.digest,
        tables=tuple(plan.table(owner) for owner in plan.owners),
    )


NAMES = [param.name for param in PARAMS if param.numel]


def test_a_name_may_be_read_by_any_worker_and_one_without_elements_by_none() -> None:
    check_consumed(MANIFEST, [reads(0, NAMES[:3]), reads(1, NAMES[2:])], [])


def test_no_more_subscriptions_are_fetched_than_it_takes() -> None:
    def fetched() -> Iterator[Subscription]:
        yield reads(0, NAMES)
        pytest.fail("all names were found")

    check_consumed(MANIFEST, fetched(), [])


@pytest.mark.parametrize(
    ("names", "unconsumed", "message"),
    [
        (NAMES[1:], [], r"no worker of any replica reads 1 of the 9 names .*: 'embed'; expected"),
        (NAMES[:2], [], r"reads 6 .*'layers\.0\.1', .*'layers\.0\.5', and 1 more; expected"),
        (NAMES[:2], ["layers.0.[2-6]"], r"reads 1 .*: 'layers\.0\.1'; .*unconsumed=\['layers"),
    ],
)
def test_what_nobody_reads_is_refused_by_name(
    names: list[str], unconsumed: list[str], message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        check_consumed(MANIFEST, [reads(0, names), reads(1, names)], unconsumed)


@pytest.mark.parametrize("unconsumed", [["*"], ["layers.*"], NAMES[2:]])
def test_what_is_allowed_may_be_read_by_nobody(unconsumed: list[str]) -> None:
    check_consumed(MANIFEST, [reads(0, NAMES[:2])], unconsumed)


# ---- the same, of a trainer ----------------------------------------------------------------------


class Source:
    def __init__(self) -> None:
        self.tensors = {name: torch.randn(4, 2) for name in ("layers.0.w", "layers.1.w", "mtp.0.w")}

    @property
    def metadata(self) -> list[SourceMeta]:
        return [SourceMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


class Told(TorchEngineClient):
    init_infos: tuple[Mapping[str, object], ...] = ()

    def init(self, init_info: Mapping[str, object]) -> None:
        self.init_infos = (*self.init_infos, init_info)
        super().init(init_info)


@pytest.fixture
def make_wire() -> MakeWire:
    fabric = InProcessFabric()
    return lambda role: InProcessWire(fabric, role)


def test_a_trainer_refuses_and_leaves_the_worker_as_it_was(make_wire: MakeWire) -> None:
    source, client = Source(), Told(make_wire, ignores=["mtp.0.w"])

    def trainer(*unconsumed: str) -> RdtTrainer:
        return RdtTrainer(
            source,
            client,
            unconsumed=unconsumed,
            make_wire=lambda: make_wire("producer"),
            timeout_seconds=20,
        )

    with trainer() as rdt, pytest.raises(SourceError, match=re.escape("'mtp.0.w'; expected")):
        rdt.init()
    assert client.calls == ["init", "shutdown"]
    assert not any(tensor.any() for tensor in client.workers[0].values())

    with trainer("mtp.*") as rdt:
        rdt.init()
        assert client.init_infos[-1]["unconsumed"] == ["mtp.*"]
        assert "unconsumed" not in client.init_infos[0], "older workers do not know it"
        rdt.send_weights()
        assert client.workers[0].keys() == {"layers.0.w", "layers.1.w"}
        for name, tensor in client.workers[0].items():
            assert torch.equal(tensor, source.tensors[name])
        client.close()
        rdt.attach()
        rdt.send_weights()


def test_another_replica_may_read_it_though_it_is_gone_later(make_wire: MakeWire) -> None:
    source = Source()
    clients = [TorchEngineClient(make_wire, ignores=[name]) for name in ("mtp.0.w", "layers.1.w")]
    with RdtTrainer(
        source, clients, make_wire=lambda: make_wire("producer"), timeout_seconds=20
    ) as rdt:
        rdt.init()
        rdt.send_weights()
        for client in clients:
            assert len(client.workers[0]) == 2
            for name, tensor in client.workers[0].items():
                assert torch.equal(tensor, source.tensors[name])
        clients[1].close()
        rdt.attach(0)
