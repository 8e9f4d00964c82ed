"""The engine inside a real `vllm.LLM` in this process, fed by a real producer over NIXL."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rdt_plan import ConsumerId, Manifest, ParamMeta, group_ordered
from rdt_transport.errors import RdtTransportError, SyncAbortedError
from rdt_transport.producer import Producer
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import JobSettings, RendezvousClient, host_local
from rdt_transport.wire.nixl import NixlWire
from rdt_vllm.engine import RdtWeightTransferEngine
from rdt_vllm.errors import (
    AttachedElsewhereError,
    InitInfoError,
    InstallError,
    LifecycleError,
    UnsupportedError,
    WorkerTornError,
)
from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.report import check_exact, greedy_tokens, observe
from rdt_vllm.testing.serving import serving
from rdt_vllm.testing.tiny_models import TINY_LLAMA, TinyModel

pytestmark = pytest.mark.engine

TINY = TinyModel("llama-tied", "llama", {"tie_word_embeddings": True})
TIMEOUT_SECONDS = 30.0


def refuse(path: str, module: torch.nn.Module) -> None:
    raise RuntimeError(f"no more {path}")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Trainer:
    """One producer, its rendezvous, and the calls that a trainer makes to vLLM."""

    def __init__(self, llm: Any, weights: Mapping[str, torch.Tensor], job: str = "job") -> None:
        self.llm = llm
        self._undo = ExitStack()
        params = {
            name: ParamMeta(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in weights.items()
        }
        self.manifest = Manifest.build([params[name] for name in group_ordered(list(params))])
        settings = JobSettings(num_producers=1, max_chunk_bytes=1 << 16)
        host = host_local(job, secrets.token_hex(8), settings)
        self._undo.callback(host.close)
        self.address = host.address
        progress = ProgressThread(lambda: NixlWire("trainer"), name="trainer")
        self._undo.callback(progress.close)
        self.client = RendezvousClient(
            self.address, on_event=lambda event: self.producer.on_event(event)
        )
        self._undo.callback(self.client.close)
        self.producer = Producer(
            progress, self.client, rank=0, manifest=self.manifest, settings=settings
        )
        self._undo.callback(self.producer.close)
        self.producer.open(TIMEOUT_SECONDS)
        self.session = self.client.job(TIMEOUT_SECONDS).session
        self.epoch = 0

    def close(self) -> None:
        self._undo.close()

    def attach(self, **fields: Any) -> None:
        info = {**self.address.init_info(), "timeout_seconds": TIMEOUT_SECONDS, **fields}
        self.llm.init_weight_transfer_engine({"init_info": info})

    def update_info(self, **fields: Any) -> dict[str, Any]:
        return {"update_info": {"session": self.session, "epoch": self.epoch, **fields}}

    def begin(self) -> None:
        self.epoch += 1
        self.producer.begin(self.client.begin(0, self.epoch, TIMEOUT_SECONDS))

    def publish(self, weights: Mapping[str, torch.Tensor], num_groups: int | None = None) -> None:
        for group in self.producer.groups[:num_groups]:
            names = self.manifest.groups[group].names
            self.producer.publish(group, {name: weights[name] for name in names}, TIMEOUT_SECONDS)

    def send(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.begin()
        with ThreadPoolExecutor(1) as pool:
            published = pool.submit(self.publish, weights)
            self.llm.start_weight_update()
            self.llm.update_weights(self.update_info())
            self.llm.finish_weight_update()
            published.result(TIMEOUT_SECONDS)
        self.producer.finish(TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return [write_checkpoint(TINY.build(seed), root / str(seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def llm(folders: list[Path]) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("UCX_NET_DEVICES", "lo")
        with serving(folders[0], distributed_executor_backend="uni") as llm:
            yield llm


@pytest.fixture
def engine(llm: Any) -> RdtWeightTransferEngine:
    (engine,) = llm.collective_rpc(lambda worker: worker.weight_transfer_engine)
    assert isinstance(engine, RdtWeightTransferEngine)
    return engine


@pytest.fixture
def make_trainer(llm: Any, folders: list[Path]) -> Iterator[Callable[..., Trainer]]:
    weights = load_file(folders[0] / "model.safetensors")
    with ExitStack() as stack:

        def make(**settings: Any) -> Trainer:
            trainer = Trainer(llm, weights, **settings)
            stack.callback(trainer.close)
            return trainer

        yield make
        llm.shutdown_weight_transfer_engine()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_syncs_are_exact_and_the_worker_outlives_its_trainer(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., Trainer],
    folders: list[Path],
) -> None:
    trainer = make_trainer()
    trainer.attach()
    for folder in (folders[1], folders[2]):
        observe(llm)
        trainer.send(weights_of(folder))

        report = check_exact(llm, folder)
        assert report.ok, report
        assert not engine.torn
        assert not check_exact(llm, folder, flip="model.norm.weight").ok

    tokens = greedy_tokens(llm, [1, 2, 3], 4)
    llm.shutdown_weight_transfer_engine()
    llm.shutdown_weight_transfer_engine()
    trainer.close()

    assert greedy_tokens(llm, [1, 2, 3], 4) == tokens
    assert not [t.name for t in threading.enumerate() if t.name.startswith("rdt-")]


def test_a_job_may_be_initialised_again_and_another_may_not(
    llm: Any, make_trainer: Callable[..., Trainer], folders: list[Path]
) -> None:
    first, second = make_trainer(), make_trainer(job="another")
    first.attach()
    first.attach()

    with pytest.raises(AttachedElsewhereError, match=r"'job'.*'another'"):
        second.attach()

    observe(llm)
    first.send(weights_of(folders[1]))
    assert check_exact(llm, folders[1]).ok
    llm.shutdown_weight_transfer_engine()
    second.attach()
    observe(llm)
    second.send(weights_of(folders[2]))
    assert check_exact(llm, folders[2]).ok


def test_a_worker_whose_rendezvous_died_serves_and_joins_the_next_trainer(
    llm: Any, make_trainer: Callable[..., Trainer], folders: list[Path]
) -> None:
    first = make_trainer()
    first.attach()
    first.send(weights_of(folders[1]))
    first.close()

    llm.start_weight_update()
    with pytest.raises(RdtTransportError, match="initialise the transfer again"):
        llm.update_weights(first.update_info(epoch=2))

    assert greedy_tokens(llm, [1, 2, 3], 2)
    second = make_trainer(job="another")
    second.attach()
    observe(llm)
    second.send(weights_of(folders[2]))
    assert check_exact(llm, folders[2]).ok


@pytest.mark.parametrize("failure", ["abort", "install", "commit"])
def test_a_failed_sync_tears_and_the_next_one_heals(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., Trainer],
    folders: list[Path],
    failure: str,
) -> None:
    trainer = make_trainer()
    trainer.attach()
    trainer.send(weights_of(folders[1]))
    trainer.begin()
    new = weights_of(folders[2])
    if failure == "install":
        engine.observe(refuse)
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(trainer.publish, new, None if failure != "abort" else 2)
        llm.start_weight_update()
        llm.update_weights(trainer.update_info())
        if failure == "abort":
            published.result(TIMEOUT_SECONDS)
            wait_until(lambda: engine.installer is not None and engine.installer.touched)
            trainer.client.fail(trainer.epoch, "the trainer gave up")
            expected: tuple[type[Exception], str] = (SyncAbortedError, "the trainer gave up")
        elif failure == "install":
            expected = (InstallError, "post-processing")
        else:
            published.result(TIMEOUT_SECONDS)
            engine.drain_pending()
            incarnation = engine.consumer_incarnation
            trainer.client.drop(ConsumerId(0, 0), incarnation, "too slow")
            expected = (RdtTransportError, "too slow")
        with pytest.raises(expected[0], match=expected[1]):
            llm.finish_weight_update()
    engine.observe(None)
    trainer.producer.abort(RuntimeError("the sync failed"))

    assert engine.torn
    with pytest.raises(WorkerTornError, match="start a new update"):
        engine.update_weights(trainer.update_info()["update_info"])
    with pytest.raises(WorkerTornError):
        engine.drain_pending()
    if failure == "commit":  # dropped: it must join again
        trainer.attach()
        assert engine.torn
    observe(llm)
    trainer.send(new)
    assert not engine.torn
    assert check_exact(llm, folders[2]).ok


def test_what_is_wrong_in_an_update_is_refused_before_anything_is_touched(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., Trainer],
    folders: list[Path],
) -> None:
    with pytest.raises(LifecycleError, match="init_weight_transfer_engine"):
        llm.start_weight_update()
    trainer = make_trainer()
    trainer.attach(timeout_seconds=3.0)  # an epoch that has not begun is waited for
    for fields in ({"session": "0" * 32}, {"epoch": 7}):
        llm.start_weight_update()
        with pytest.raises((InitInfoError, RdtTransportError)):
            llm.update_weights(trainer.update_info(**fields))
        assert not engine.torn
    llm.start_weight_update()
    llm.finish_weight_update()  # without an update: nothing happens
    observe(llm)
    trainer.send(weights_of(folders[1]))
    assert check_exact(llm, folders[1]).ok


def test_what_is_wrong_in_an_init_is_refused(
    llm: Any, make_trainer: Callable[..., Trainer]
) -> None:
    trainer = make_trainer()
    with pytest.raises(RdtTransportError, match="token"):
        trainer.attach(token="wrong")
    with pytest.raises(RdtTransportError, match="host:port"):
        trainer.attach(address="nowhere")
    with pytest.raises(InitInfoError, match="replica 3 of 2"):
        trainer.attach(replica=3, num_replicas=2)
    with pytest.raises(InitInfoError, match="positive"):
        trainer.attach(timeout_seconds=0)
    trainer.attach()


def test_weights_that_nobody_consumes_are_refused(llm: Any, folders: list[Path]) -> None:
    trainer = Trainer(llm, {"other.weight": torch.zeros(4)})
    try:
        with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM.*'other\.weight'"):
            trainer.attach()
    finally:
        trainer.close()


def test_a_model_hook_is_refused(
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        type(engine.model), "process_weights_after_loading", lambda self: None, raising=False
    )
    with pytest.raises(UnsupportedError, match="as a whole"):
        make_trainer().attach()


def test_weights_that_only_others_consume_are_no_error(llm: Any, tmp_path: Path) -> None:
    """A trainer with an untied head has one weight more than this worker consumes."""
    folder = write_checkpoint(TINY_LLAMA.build(1), tmp_path / "untied")
    trainer = Trainer(llm, weights_of(folder))
    try:
        trainer.attach()
        observe(llm)
        trainer.send(weights_of(folder))
        assert check_exact(llm, folder).ok
    finally:
        llm.shutdown_weight_transfer_engine()
        trainer.close()
