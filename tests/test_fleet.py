"""One trainer before real vLLMs of different sizes, which fail, come and go: exact, or named."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rdt_trainer import ClientError, LocalClient, ModuleSource, RdtTrainer, SourceError
from rdt_trainer.call_thread import CallThread
from rdt_transport.rendezvous import JobSettings
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from rdt_vllm.testing.report import check_exact, observe
from rdt_vllm.testing.serving import EngineCache, kill_engine, start_engine, stop_engine
from rdt_vllm.testing.tiny_models import TINY_QWEN3, draw_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TIMEOUT_SECONDS = 120.0  # of waits that must end before


class WatchedSource(ModuleSource):
    """``meanwhile`` is called with each name before its tensor is yielded."""

    meanwhile: Callable[[str], None] = staticmethod(lambda name: None)

    def iter_full(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in super().iter_full():
            self.meanwhile(name)
            yield name, tensor


class Server(LocalClient):
    """An engine that may die and be replaced, as a server behind an address.

    A call of vLLM's own client never returns when the engine's process was killed; a connection to
    a server breaks, and so does this, long before `LocalClient` would give up.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._died = threading.Event()

    def die(self) -> None:
        kill_engine(self._llm)
        self._died.set()

    def replace(self, llm: Any) -> None:
        self._llm = llm
        self._died = threading.Event()

    def _call(self, method: str, *arguments: Any) -> Any:
        function = getattr(self._llm, method)
        thread = CallThread("call of an engine that may die")
        call = thread.submit(lambda: function(*arguments))
        thread.close(wait=False)
        while not call.done():
            if self._died.wait(0.01):
                raise ClientError(f"{method}: the connection broke", server_text="")
        try:
            return call.result()
        except Exception as error:
            raise ClientError(f"{method}: {error}", server_text=str(error)) from error


class Fleet:
    """A trainer and the engines that it feeds, by replica."""

    def __init__(self, folder: Path, *llms: Any) -> None:
        self.llms = list(llms)
        self.model = TINY_QWEN3.build(seed=1)
        self.source = WatchedSource(self.model)
        self.servers = [Server(llm) for llm in llms]
        self.trainer = RdtTrainer(
            self.source,
            self.servers,
            settings=JobSettings(1, len(llms), max_chunk_bytes=16 << 10),
            timeout_seconds=TIMEOUT_SECONDS,
        )
        self._folder = folder

    def add(self, llm: Any) -> int:
        """One more engine; its replica."""
        self.llms.append(llm)
        self.servers.append(Server(llm))
        return self.trainer.add_replica(self.servers[-1])

    def draw(self, seed: int) -> Path:
        """New weights in the trainer; the checkpoint that says what they are."""
        draw_weights(self.model, seed)
        return write_weights(ModuleSource(self.model).iter_full(), self._folder / str(seed))

    def send(self, seed: int, *committed: int) -> dict[int, str]:
        """A sync that exactly these replicas complete, and are exact; why the others did not."""
        checkpoint = self.draw(seed)
        for replica in committed:
            observe(self.llms[replica])
        report = self.trainer.send_weights()
        assert report.committed == committed
        for replica in committed:
            check_exact(self.llms[replica], checkpoint).require()
        return dict(report.dropped)


@contextmanager
def fleet_of(folder: Path, *llms: Any) -> Iterator[Fleet]:
    fleet = Fleet(folder, *llms)
    try:
        fleet.trainer.init()
        yield fleet
    finally:
        fleet.trainer.close()


def served(engines: EngineCache) -> Path:
    return write_checkpoint(TINY_QWEN3.build(seed=1), engines.folder / "qwen3")


def test_replicas_of_different_sizes_are_exact_before_and_after_an_error(
    engines: EngineCache, tmp_path: Path
) -> None:
    folder = served(engines)
    with fleet_of(tmp_path, engines.get(folder, 2), engines.get(folder, 1)) as fleet:
        for seed in (51, 52):
            assert fleet.send(seed, 0, 1) == {}

        def fail(name: str) -> None:
            if name == "model.norm.weight":
                raise ZeroDivisionError("gather failed")

        fleet.source.meanwhile = fail
        with pytest.raises(SourceError, match="gather failed"):
            fleet.trainer.send_weights()
        fleet.source.meanwhile = lambda name: None
        assert fleet.send(53, 0, 1) == {}


class Spare:
    """An engine that a test may kill; the next one starts another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.llm: Any = start_engine(folder)

    def restart(self) -> Any:
        stop_engine(self.llm)
        self.llm = start_engine(self._folder)
        return self.llm


@pytest.fixture(scope="module")
def spare(engines: EngineCache) -> Iterator[Spare]:
    spare = Spare(served(engines))
    yield spare
    stop_engine(spare.llm)


def test_a_third_replica_joins_and_one_leaves_between_syncs(
    engines: EngineCache, tmp_path: Path, spare: Spare
) -> None:
    folder = served(engines)
    one, two = engines.get(folder, 1), engines.get(folder, 2)
    with fleet_of(tmp_path, two, one) as fleet:
        for seed in (54, 55):
            assert fleet.send(seed, 0, 1) == {}
        assert fleet.add(spare.llm) == 2
        assert fleet.send(56, 0, 1, 2) == {}
        fleet.trainer.remove_replica(1)
        assert fleet.send(57, 0, 2) == {}
        check_exact(one, tmp_path / "56").require()  # it keeps what it had
        assert fleet.add(one) == 3
        assert fleet.send(58, 0, 2, 3) == {}


def test_a_killed_replica_is_named_and_joins_again_when_it_has_restarted(
    engines: EngineCache, tmp_path: Path, spare: Spare
) -> None:
    """Groups before the last are read when it dies, and the last is not published yet."""
    folder = served(engines)
    with fleet_of(tmp_path, engines.get(folder, 1), spare.llm) as fleet:
        assert fleet.send(61, 0, 1) == {}

        def kill(name: str) -> None:
            if name == "model.norm.weight":
                fleet.source.meanwhile = lambda name: None
                fleet.servers[1].die()

        fleet.source.meanwhile = kill
        dropped = fleet.send(62, 0)
        assert "connection closed" in dropped[1] or "connection broke" in dropped[1]

        assert "it took no part" in fleet.send(63, 0)[1]  # and nobody waits for it
        fleet.llms[1] = spare.restart()
        fleet.servers[1].replace(spare.llm)
        assert fleet.send(64, 0, 1) == {}
