"""A trainer and its deployment in different places: behind HTTP, in a Ray actor, behind FSDP."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from torch import nn

from rdt_trainer import (
    ClientError,
    HttpClient,
    JobSettings,
    LocalClient,
    ModuleSource,
    RayClient,
    RdtTrainer,
    SyncFailedError,
)
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.wire.nixl import NixlWire


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def step(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.ones_like(parameter))


def assert_equal(received: dict[str, torch.Tensor], module: nn.Module) -> None:
    expected = dict(module.named_parameters())
    assert received.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(received[name], tensor), name


class Llm:
    """The methods and the request shapes of vLLM's engine classes, before real consumers."""

    def __init__(self) -> None:
        self.client = TorchEngineClient(NixlWire)
        self.error = ""

    def init_weight_transfer_engine(self, request):
        self.client.init(request["init_info"] if isinstance(request, dict) else request.init_info)

    def start_weight_update(self):
        self.client.start()

    def update_weights(self, request):
        if self.error:
            raise ValueError(self.error)
        info = request["update_info"] if isinstance(request, dict) else request.update_info
        self.client.update(info)

    def finish_weight_update(self, weight_version=None):
        self.client.finish(weight_version)

    def shutdown_weight_transfer_engine(self):
        self.client.shutdown()

    def fail_with(self, error: str) -> None:
        self.error = error

    def received(self) -> tuple[dict[str, torch.Tensor], str | None]:
        return self.client.workers[0], self.client.weight_version


@contextmanager
def served(llm: Llm, breaks: Sequence[tuple[str, str]] = ()) -> Iterator[str]:
    """Serves an `Llm` at vLLM's routes, with vLLM's error bodies; yields the base URL.

    ``breaks`` says where the connection breaks, once each: "before" or "after" a method's call.
    """
    left = list(breaks)

    def is_broken(when: str, method: str) -> bool:
        if (when, method) not in left:
            return False
        left.remove((when, method))
        return True

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            arguments = json.loads(body) if body else {}
            name = self.path.strip("/")
            method = getattr(llm, name)
            if is_broken("before", name):
                self.close_connection = True
                return
            takes_request = self.path in ("/init_weight_transfer_engine", "/update_weights")
            try:
                method(arguments) if takes_request else method(**arguments)
                status, answer = 200, {"message": "ok"}
            except Exception as error:
                status, answer = 500, {"error": {"message": str(error), "code": 500}}
            if is_broken("after", name):
                self.close_connection = True
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_over_http():
    module, llm = model(), Llm()
    with served(llm) as url, HttpClient(url, timeout_seconds=30) as client:
        with RdtTrainer(ModuleSource(module), client, timeout_seconds=300) as trainer:
            trainer.init()
            trainer.send_weights()
            assert_equal(llm.received()[0], module)
            llm.fail_with("worker 3: no space left in the KV cache")
            with pytest.raises(SyncFailedError, match="no space left") as caught:
                trainer.send_weights()
            cause = caught.value.__cause__
            assert isinstance(cause, ClientError)
            assert (cause.status, cause.server_text) == (500, llm.error)
            llm.fail_with("")
            step(module)
            trainer.send_weights("v3")
            assert_equal(llm.received()[0], module)
            assert llm.received()[1] == "v3"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["start_weight_update", "update_weights"])
def test_http_that_breaks_needs_no_clean_up(when, method):
    """The call is lost, or its answer is: the server has an update open that nobody finishes."""
    module, llm = model(), Llm()
    with (
        served(llm, [(when, method)]) as url,
        HttpClient(url, timeout_seconds=30) as client,
        RdtTrainer(ModuleSource(module), client, timeout_seconds=300) as trainer,
    ):
        trainer.init()
        with pytest.raises(SyncFailedError, match=f"{method}: the connection broke"):
            trainer.send_weights()
        assert "finish" not in llm.client.calls
        for _ in range(2):
            step(module)
            trainer.send_weights()
            assert_equal(llm.received()[0], module)


def test_in_process():
    module, llm = model(), Llm()
    with RdtTrainer(ModuleSource(module), LocalClient(llm), timeout_seconds=60) as trainer:
        trainer.init()
        for epoch in ("1", "2"):
            step(module)
            trainer.send_weights()
            assert_equal(llm.received()[0], module)
            assert llm.received()[1] == epoch


def test_in_ray():
    """The rendezvous is one actor, the engine another; both are in other processes."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        module = model()
        actor = ray.remote(num_cpus=0)(Llm).remote()
        client = RayClient(actor, timeout_seconds=60)
        with RdtTrainer(ModuleSource(module), client, ray="auto", timeout_seconds=300) as trainer:
            trainer.init()
            for epoch in ("1", "2"):
                step(module)
                trainer.send_weights()
                received, version = ray.get(actor.received.remote())
                assert_equal(received, module)
                assert version == epoch
            ray.get(actor.fail_with.remote("no memory in the actor"))
            with pytest.raises(SyncFailedError, match="ValueError: no memory in the actor"):
                trainer.send_weights()
            ray.get(actor.fail_with.remote(""))
            step(module)
            trainer.send_weights()
            assert_equal(ray.get(actor.received.remote())[0], module)
    finally:
        ray.shutdown()


def test_from_sharded_ranks(tmp_path):
    """Two processes shard one model; rank 0 tells the other where the rendezvous is."""
    import torch.multiprocessing as mp

    mp.spawn(_train_sharded, args=(f"file://{tmp_path}/store", str(tmp_path)), nprocs=2)
    for epoch in (1, 2):
        module = model()
        for _ in range(epoch):
            step(module)
        received = torch.load(tmp_path / f"epoch{epoch}", weights_only=True)
        assert_equal(received, module)


def _train_sharded(rank: int, init_method: str, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    try:
        module = model()
        fully_shard(module, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        client = TorchEngineClient(NixlWire) if rank == 0 else None
        with RdtTrainer(
            ModuleSource(module),
            client,
            rank=rank,
            settings=JobSettings(num_producers=2),
            timeout_seconds=60,
        ) as trainer:
            trainer.init()
            for epoch in (1, 2):
                step(module)
                report = trainer.send_weights()
                assert report.epoch == epoch
                if client is not None:
                    torch.save(client.workers[0], f"{folder}/epoch{epoch}")
            torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
