"""Bad input that takes several packages to notice: a clear error, and nothing is lost."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rdt_bake
from rdt_plan import (
    WIRE_VERSION,
    ChunkTable,
    ConsumerId,
    Manifest,
    ParamMeta,
    Subscription,
    SyncPlan,
    build_plan,
    canonical,
    pack_layout,
    whole,
)
from rdt_trainer import ClientError, LocalClient, ModuleSource, RdtTrainer, SourceError
from rdt_transport.errors import DisagreementError, RendezvousError, TokenError, TornError
from rdt_transport.rendezvous import JobSettings, RendezvousClient
from rdt_transport.testing.fleet import Fleet, Sink
from rdt_transport.testing.job_records import incarnation
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

WAIT_SECONDS = 20.0


class Layer(nn.Module):
    """Loads one half of ``w`` and all of ``b``; skips what it does not know, as many loaders do."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "layers.0.w":
                self.w.data.copy_(weight.chunk(2)[1])
            elif name == "layers.0.b":
                self.b.data.copy_(weight)


MANIFEST = Manifest.build(
    [
        ParamMeta("layers.0.w", "float32", (4, 4)),
        ParamMeta("layers.0.b", "float32", (4,)),
        ParamMeta("layers.1.w", "float32", (4,), (1,)),
    ]
)
STRANGER = ConsumerId(1, 0)


def recorded_plan(consumer: ConsumerId) -> SyncPlan:
    layer = Layer()
    recording = rdt_bake.record(layer, layer.load_weights, MANIFEST.params)
    recording.require_coverage()
    return build_plan(MANIFEST, recording.writes, consumer, num_workers=1)


def subscription(wire: InProcessWire, *tables: ChunkTable, **fields: Any) -> Subscription:
    address = wire.address()
    head = Subscription(
        consumer=STRANGER,
        num_workers=1,
        incarnation=incarnation(),
        wire_name=address.name,
        metadata=address.metadata,
        wire_version=WIRE_VERSION,
        plan_digest=tables[0].plan_digest,
        tables=tables,
    )
    return replace(head, **fields)


@pytest.fixture
def make_wire() -> Callable[[str], InProcessWire]:
    fabric = InProcessFabric()
    return lambda role: InProcessWire(fabric, role)


@pytest.fixture
def layer() -> Layer:
    """What the one good consumer of `fleet` fills."""
    return Layer()


@pytest.fixture
def fleet(make_wire: Callable[[str], InProcessWire], layer: Layer) -> Iterator[Fleet]:
    sink = Sink({("", "w"): layer.w.data, ("", "b"): layer.b.data})
    settings = JobSettings(num_producers=2, num_replicas=2)
    writes = rdt_bake.record(layer, layer.load_weights, MANIFEST.params).writes
    with Fleet(make_wire, MANIFEST, [writes], [sink], settings=settings) as fleet:
        fleet.sync(drawn(0))
        yield fleet
    sink.close()


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p.name: torch.randn(p.shape, generator=generator) for p in MANIFEST.params}


def assert_as_before(fleet: Fleet, layer: Layer) -> None:
    """Nothing of the bad input arrived, and the next sync of the others is exact."""
    for seed in (0, 1):
        if seed:
            fleet.sync(drawn(seed))
        fresh = Layer()
        fresh.load_weights(iter(drawn(seed).items()))
        for name, parameter in fresh.named_parameters():
            assert torch.equal(layer.get_parameter(name), parameter), (seed, name)


# ---- chunk tables --------------------------------------------------------------------------------


def table() -> ChunkTable:
    return recorded_plan(STRANGER).table(0)


def with_row(**changes: Any) -> ChunkTable:
    return replace(table(), chunks=(replace(table().chunks[0], **changes),))


def with_slices(*params: ParamMeta, stretch: int = 0) -> ChunkTable:
    """A table that reads ``params``, the first of them ``stretch`` elements beyond its end."""
    first, *rest = params
    slices = [canonical(first.name, first.dtype, 0, (first.numel + stretch,), (1,))]
    slices += [whole(param) for param in rest]
    layout = pack_layout(slices)
    changed = with_row(slices=tuple(slices), offsets=layout.offsets, num_bytes=layout.num_bytes)
    return replace(changed, slot_bytes=-(-layout.num_bytes // 16) * 16)


W, B, OTHERS = MANIFEST.params


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (
            with_slices(W, stretch=1),
            r"chunk 0: 'layers\.0\.w': expected a slice within its 64 bytes, found .* byte 68",
        ),
        (
            with_row(num_bytes=1 << 40),
            r"chunk 0: expected the pack layout .*, found .*num_bytes=10",
        ),
        (
            with_slices(ParamMeta("layers.0.x", "float32", (4,))),
            r"chunk 0: 'layers\.0\.x' is not in the manifest of 3 parameters: expected one of",
        ),
        (with_slices(OTHERS), r"chunk 0: 'layers\.1\.w' is held by ranks \(1,\), not by rank 0"),
        (with_row(group=1), r"chunk 0: rank 0 holds nothing of gather group 1"),
        (replace(table(), slot_bytes=1 << 50), r"expected slot_bytes=48, .* found slot_bytes=11"),
    ],
    ids=["beyond", "num_bytes", "unknown", "foreign", "group", "slot_bytes"],
)
def test_a_table_out_of_bounds_is_refused_before_anything_is_registered(
    fleet: Fleet,
    layer: Layer,
    make_wire: Callable[[str], InProcessWire],
    bad: ChunkTable,
    found: str,
) -> None:
    with RendezvousClient(fleet.host.address) as client:
        client.subscribe(subscription(make_wire("stranger"), bad), WAIT_SECONDS)
        with pytest.raises(
            TornError, match=f"producer 0 cannot serve it: .*table of r1w0.*{found}"
        ) as caught:
            client.offers(STRANGER, WAIT_SECONDS)
    assert "build the plan from the manifest and the settings of the job" in str(caught.value)
    assert_as_before(fleet, layer)


@pytest.mark.parametrize(
    ("tables", "fields", "error", "found"),
    [
        (
            [replace(table(), num_slots=7)],
            {},
            DisagreementError,
            "r1w0 wants 7 slots of producer 0; the job has 2 slots and 2 producers; build the plan",
        ),
        (
            [replace(table(), owner=5)],
            {},
            DisagreementError,
            "r1w0 wants 2 slots of producer 5; the job has 2 slots and 2 producers; build the plan",
        ),
        (
            [table()],
            {"plan_digest": "f" * 64},
            TornError,
            f"r1w0 of plan {'f' * 64} sent a chunk table of plan {table().plan_digest}",
        ),
    ],
    ids=["num_slots", "owner", "plan_digest"],
)
def test_a_subscription_that_contradicts_the_job_or_itself_is_refused(
    fleet: Fleet,
    layer: Layer,
    make_wire: Callable[[str], InProcessWire],
    tables: list[ChunkTable],
    fields: dict[str, Any],
    error: type[RendezvousError],
    found: str,
) -> None:
    with RendezvousClient(fleet.host.address) as client, pytest.raises(error, match=found):
        client.subscribe(subscription(make_wire("stranger"), *tables, **fields), WAIT_SECONDS)
        client.offers(STRANGER, WAIT_SECONDS)
    assert_as_before(fleet, layer)


def test_a_consumer_with_a_wrong_token_learns_nothing(fleet: Fleet, layer: Layer) -> None:
    wrong = replace(fleet.host.address, token="wrong")
    with pytest.raises(TokenError, match=r"token.*init_info") as caught:
        RendezvousClient(wrong)
    assert fleet.host.address.token not in str(caught.value)
    assert_as_before(fleet, layer)


# ---- names that the loaders do not know, with the real loaders -----------------------------------

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_name_that_the_loaders_do_not_know(engines: Any, tmp_path: Path) -> None:
    """One they stumble over is the worker's to refuse, one they skip in silence the trainer's."""
    from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
    from rdt_vllm.testing.report import check_exact, observe
    from rdt_vllm.testing.tiny_models import TINY_MODELS

    model = TINY_MODELS["llama-tied"].build(seed=1)
    llm: Any = engines.get(write_checkpoint(model, engines.folder / "llama-tied"), 1)

    def trainer(extra: dict[str, str], **options: Any) -> RdtTrainer:
        source = ModuleSource(model, extra_names=extra)
        return RdtTrainer(source, LocalClient(llm), timeout_seconds=60, **options)

    with trainer({"model.layers.0.mlp.typo.weight": NORM}) as rdt:
        with pytest.raises(ClientError, match=r"LlamaForCausalLM cannot load .*typo.*same model"):
            rdt.init()
    with trainer({"lm_head.weight": EMBEDDING}) as rdt:
        with pytest.raises(SourceError, match=r"no worker .* reads 1 of .*: 'lm_head\.weight'"):
            rdt.init()

    with trainer({"lm_head.weight": EMBEDDING}, unconsumed=["lm_head.weight"]) as rdt:
        rdt.init()
        observe(llm)
        rdt.send_weights()
        weights = write_weights(ModuleSource(model).iter_full(), tmp_path / "weights")
        check_exact(llm, weights).require()
