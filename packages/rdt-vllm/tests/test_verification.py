"""Verified syncs of real vLLM models, without an engine: what differs is found, wherever it is."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rdt_plan import Chunk
from rdt_plan.staging import is_staging
from rdt_transport.checksums import chunk_checksums, sync_key
from rdt_vllm._vllm import VllmConfig
from rdt_vllm.errors import InitInfoError, VerificationError
from rdt_vllm.testing.bits import flip_byte
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from rdt_vllm.testing.install_worker import Answers, InstallWorker, pack_chunk
from rdt_vllm.testing.single_worker import single_worker
from rdt_vllm.testing.tiny_models import TINY_JAMBA, TINY_LLAMA, TINY_QWEN3_MOE, TinyModel

pytestmark = pytest.mark.engine

TIMEOUT_SECONDS = 60.0
Weights = dict[str, torch.Tensor]
Change = Callable[[Chunk, torch.Tensor], None]


@pytest.fixture
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InstallWorker]:
    """Served from one draw of the model; parameters: the model, what is sent as, what is live."""
    tiny, dtype, live = request.param
    folder = write_checkpoint(tiny.build(0), tmp_path / "served")
    if dtype is not None:
        weights = load_file(folder / "model.safetensors")
        write_weights(((name, each.to(dtype)) for name, each in weights.items()), folder)
    with single_worker(folder) as config:
        yield made(config, folder, live)


def made(config: VllmConfig, folder: Path, live: bool) -> InstallWorker:
    return InstallWorker(config, folder, live=live, direct=live)


def weights_of(worker: InstallWorker, seed: int) -> Weights:
    """Of the shapes and dtypes that the worker was served, small enough for any dtype."""
    generator = torch.Generator().manual_seed(seed)
    return {
        param.name: torch.randn(param.shape, generator=generator).to(getattr(torch, param.dtype))
        for param in worker.manifest.params
    }


def checksums_of(worker: InstallWorker, weights: Weights) -> dict[str, Any]:
    key = sync_key()
    table = worker.plan.table(0)
    found = list(chunk_checksums(table, bytes.fromhex(key), weights.__getitem__))
    return {"key": key, "workers": {"0": {"0": found}}}


def sync(worker: InstallWorker, weights: Weights, checksums: Any, change: Change) -> None:
    """One sync; ``change`` may damage what a chunk brings on its way, or in the model."""
    answers = Answers()
    worker.installer.begin(answers, checksums)
    try:
        for chunk in worker.plan.chunks:
            if chunk.is_direct:
                worker._read(chunk, weights)
                change(chunk, torch.empty(0))
            else:
                packed = pack_chunk(chunk, weights)
                change(chunk, packed)
                worker.installer.install(chunk, packed)
        worker.installer.finish(TIMEOUT_SECONDS)
    except BaseException as error:
        worker.installer.abandon(error, TIMEOUT_SECONDS)
        raise


def unchanged(chunk: Chunk, packed: torch.Tensor) -> None:
    """What comes is what was sent."""


def flipped_in(
    worker: InstallWorker, flipped: Chunk, position: int, chunk: Chunk, packed: torch.Tensor
) -> None:
    """One bit of one slice is another: where it is read to, or on its way."""
    if chunk is flipped and chunk.is_direct:
        placement = chunk.placements[position]
        flip_byte(worker.units.live_tensors()[placement.module, placement.param])
    elif chunk is flipped:
        packed[chunk.serve.offsets[position]] ^= 1


def changed(module: str, param: str, path: str, filled: nn.Module) -> None:
    """An observer that damages the first element: the last rows may be padding."""
    if path == module:
        tensor = getattr(filled, param).data
        tensor[(0,) * tensor.ndim] += 1


ALL = pytest.mark.parametrize(
    "worker",
    [
        pytest.param((TINY_LLAMA, None, True), id="llama-live"),
        pytest.param((TINY_LLAMA, None, False), id="llama-layerwise"),
        pytest.param((TINY_LLAMA, torch.float32, True), id="llama-cast"),
        pytest.param((TINY_QWEN3_MOE, None, True), id="experts"),
        pytest.param((TINY_JAMBA, None, True), id="programs"),
        pytest.param(
            (TinyModel("padded", "llama", {"vocab_size": 500}), None, True), id="padded-vocabulary"
        ),
    ],
    indirect=True,
)


@ALL
def test_a_flipped_byte_of_any_slice_is_found_and_nothing_else_is(worker: InstallWorker) -> None:
    weights = weights_of(worker, 1)
    checksums = checksums_of(worker, weights)
    sync(worker, weights, checksums, unchanged)

    regions = [(c, each) for c in worker.plan.chunks for each in range(len(c.serve.slices))]
    assert len(regions) > 10
    for flipped, position in regions[:: max(1, len(regions) // 12)]:
        name = flipped.serve.slices[position].name

        flip = partial(flipped_in, worker, flipped, position)
        with pytest.raises(VerificationError, match=f"other than what was sent.*{name}, as it"):
            sync(worker, weights, checksums, flip)
    sync(worker, weights, checksums, unchanged)


@ALL
def test_what_stands_wrongly_in_the_model_is_found(worker: InstallWorker) -> None:
    """Everything arrives as it was sent, and then a tensor that it was placed into is changed."""
    weights = weights_of(worker, 1)
    checksums = checksums_of(worker, weights)
    placed = dict.fromkeys(
        (each.module, each.param)
        for each in chain.from_iterable(chunk.placements for chunk in worker.plan.chunks)
        if not is_staging(each.param)
    )
    for module, param in list(placed)[:: max(1, len(placed) // 8)]:
        worker.installer.observe(partial(changed, module, param))
        with pytest.raises(VerificationError, match="as it stands in"):
            sync(worker, weights, checksums, unchanged)
    worker.installer.observe(None)
    sync(worker, weights, checksums, unchanged)


@pytest.mark.parametrize("worker", [(TINY_LLAMA, None, True)], indirect=True, ids=["llama"])
def test_checksums_of_another_plan_or_sync_are_refused(worker: InstallWorker) -> None:
    weights = weights_of(worker, 1)
    checksums = checksums_of(worker, weights)
    chunks = checksums["workers"]["0"]["0"]
    for wrong in (
        {},
        {**checksums, "key": "no key"},
        {**checksums, "key": "00" * 65},
        {**checksums, "workers": {"1": {"0": chunks}}},
        {**checksums, "workers": {"0": {"1": chunks}}},
        {**checksums, "workers": {"0": {"0": chunks[:-1]}}},
        {**checksums, "workers": {"0": {"0": [chunks[0] + "0" * 16, *chunks[1:]]}}},
        [],
    ):
        with pytest.raises(InitInfoError, match="checksums"):
            sync(worker, weights, wrong, unchanged)
    with pytest.raises(VerificationError, match="other than what was sent"):  # another sync's key
        sync(worker, weights, {**checksums, "key": sync_key()}, unchanged)


@pytest.mark.parametrize("worker", [(TINY_LLAMA, None, True)], indirect=True, ids=["llama"])
def test_a_module_that_nobody_looked_at_is_no_success(worker: InstallWorker) -> None:
    weights = weights_of(worker, 1)
    worker.installer.observe(None)
    worker.installer._observe = lambda unit: None  # ty: ignore
    with pytest.raises(VerificationError, match="were not seen"):
        sync(worker, weights, checksums_of(worker, weights), unchanged)
