import sys

import pytest
import ray

from rdt_trainer.errors import ClientError, SettingsError
from rdt_trainer.ray_client import RayClient


class Engine:
    """An actor with the methods of vLLM's AsyncLLM, which takes requests by attribute."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.cache_is_free = True

    async def init_weight_transfer_engine(self, request):
        self.calls.append(("init", request.init_info))

    async def start_weight_update(self):
        self.calls.append(("start",))

    async def update_weights(self, request):
        if request.update_info["epoch"] < 0:
            raise ValueError("epoch -1 is not open")
        self.calls.append(("update", request.update_info))

    async def finish_weight_update(self, weight_version=None):
        if weight_version == "never":
            import asyncio

            await asyncio.sleep(60)
        if weight_version == "late":
            raise ray.exceptions.GetTimeoutError("a worker hangs")
        self.calls.append(("finish", weight_version))

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return self.cache_is_free

    def asked(self):
        return self.calls

    def hold_cache(self):
        self.cache_is_free = False


class Generator(Engine):
    """AsyncLLM, which can pause."""

    async def pause_generation(self, *, mode="abort", clear_cache=True):
        self.calls.append(("pause", mode))

    async def is_paused(self):
        return self.calls[-1][0] == "pause"

    async def resume_generation(self):
        self.calls.append(("resume",))


class Sleeper(Engine):
    """LLM, which sleeps instead."""

    async def sleep(self, level=1, mode="abort"):
        self.calls.append(("sleep", level, mode))

    async def wake_up(self, tags=None):
        self.calls.append(("wake_up", tags))


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def actors(cluster):
    """Makes actors that need no cpu, so that several fit; they end with the test."""
    made = []

    def make(cls):
        made.append(ray.remote(num_cpus=0)(cls).remote())
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


def test_every_call_reaches_every_handle(actors):
    handles = [actors(Generator), actors(Generator)]
    client = RayClient(handles, timeout_seconds=60)
    client.init({"job": "j"})
    assert not client.is_paused()
    client.pause("wait")
    assert client.is_paused()
    client.start()
    client.update({"epoch": 3})
    client.finish("3")
    client.reset_prefix_cache()
    client.resume()
    client.close()
    for handle in handles:
        assert ray.get(handle.asked.remote()) == [
            ("init", {"job": "j"}),
            ("pause", "wait"),
            ("start",),
            ("update", {"epoch": 3}),
            ("finish", "3"),
            ("resume",),
        ]


class Ordered:
    """vLLM's LLM: no call of it is async, and it refuses an update that was not started."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = ""

    def fail_in(self, call):
        self.fails = call

    def start_weight_update(self):
        self._call("start", "start")

    def update_weights(self, request):
        self._call("update", f"update {request.update_info['epoch']}")

    def finish_weight_update(self, weight_version=None):
        self._call("finish", f"finish {weight_version}")

    def _call(self, call, told):
        if self.fails == call:
            raise RuntimeError("no memory")
        if len(self.calls) < ["start", "update", "finish"].index(call):
            raise RuntimeError("what comes before has failed")
        self.calls.append(told)

    def asked(self):
        return self.calls


class Logged(RayClient):
    """Keeps when it submits a call, and when it begins to wait for the answers."""

    def _submit(self, method, *arguments, **options):
        self.log.append(f"submit {method}")
        return super()._submit(method, *arguments, **options)

    def _answers(self, method, references):
        self.log.append(f"await {method}")
        return super()._answers(method, references)


METHODS = ("start_weight_update", "update_weights", "finish_weight_update")


@pytest.mark.parametrize("kind", [Ordered, Engine])
def test_all_calls_are_on_their_way_at_once_where_order_is_kept(actors, kind):
    handle = actors(kind)
    client = Logged(handle, timeout_seconds=60)
    client.log = []
    calls = client.submit({"epoch": 3}, "v3")
    if kind is Ordered:
        assert client.log == [f"submit {method}" for method in METHODS]
        assert list(calls) == ["update", "finish"]
        assert client.log[3:] == [f"await {method}" for method in METHODS]
        assert ray.get(handle.asked.remote()) == ["start", "update 3", "finish v3"]
    else:
        assert client.log == []
        assert list(calls) == ["start", "update", "finish"]
        assert client.log == [f"{what} {m}" for m in METHODS for what in ("submit", "await")]
        told = [("start",), ("update", {"epoch": 3}), ("finish", "v3")]
        assert ray.get(handle.asked.remote()) == told


@pytest.mark.parametrize(
    ("call", "reached", "done"),
    [
        ("start", ["update"], []),
        ("update", ["update"], ["start"]),
        ("finish", ["update", "finish"], ["start", "update 3"]),
    ],
)
def test_the_first_call_that_fails_is_told_and_what_follows_changes_nothing(
    actors, call, reached, done
):
    handle = actors(Ordered)
    ray.get(handle.fail_in.remote(call))
    method = METHODS[["start", "update", "finish"].index(call)]
    found: list[str] = []
    with pytest.raises(ClientError, match=f"{method}: RuntimeError: no memory"):
        found += RayClient(handle, timeout_seconds=60).submit({"epoch": 3})
    assert found == reached  # what came before the error is kept
    assert ray.get(handle.asked.remote()) == done


def test_each_handles_answer_comes_in_the_order_of_the_handles(actors):
    handles = [actors(Generator) for _ in range(3)]
    ray.get(handles[1].hold_cache.remote())
    client = RayClient(handles, timeout_seconds=60)
    assert client._call("reset_prefix_cache") == [True, False, True]


def test_engine_that_cannot_pause_sleeps(actors):
    handle = actors(Sleeper)
    client = RayClient(handle, timeout_seconds=60)
    client.pause()
    client.resume()
    calls = ray.get(handle.asked.remote())
    assert calls == [("sleep", 0, "abort"), ("wake_up", ["scheduling"])]


def test_engine_errors_carry_the_actors_words(actors):
    client = RayClient(actors(Generator), timeout_seconds=60)
    with pytest.raises(ClientError, match="update_weights: ValueError: epoch -1") as caught:
        client.update({"epoch": -1})
    assert caught.value.server_text == "ValueError: epoch -1 is not open"


def test_error_of_one_handle_does_not_wait_for_the_others(actors):
    busy, dead = actors(Generator), actors(Generator)
    ray.get(dead.asked.remote())
    client = RayClient([busy, dead], timeout_seconds=50)
    ray.kill(dead)
    with pytest.raises(ClientError, match="finish_weight_update: ActorDiedError"):
        client.finish("never")


def test_call_has_a_deadline(actors):
    client = RayClient(actors(Generator), timeout_seconds=0.5)
    with pytest.raises(ClientError, match=r"no answer within 0\.5 seconds"):
        client.finish("never")


def test_a_deadline_of_the_actors_own_is_told_as_its_own(actors):
    client = RayClient(actors(Generator), timeout_seconds=60)
    with pytest.raises(ClientError, match=r"finish_weight_update: GetTimeoutError: a worker hangs"):
        client.finish("late")


class Lost:
    """A handle whose cluster is gone."""

    class finish_weight_update:
        @staticmethod
        def remote(version):
            raise ConnectionError("the cluster is gone")


def test_a_call_that_cannot_be_made_is_a_client_error():
    with pytest.raises(ClientError, match=r"finish_weight_update: ConnectionError: the cluster is"):
        RayClient(Lost()).finish("1")


def test_held_cache_is_an_error(actors):
    handle = actors(Generator)
    ray.get(handle.hold_cache.remote())
    with pytest.raises(ClientError, match="still holds cached blocks"):
        RayClient(handle, timeout_seconds=60).reset_prefix_cache()


def test_missing_method_names_what_was_expected(actors):
    with pytest.raises(ClientError, match=r"has no shutdown_weight.*: expected.*0\.29"):
        RayClient(actors(Generator)).shutdown()


def test_ray_that_is_missing_or_too_old_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(ray, "__version__", "2.55.1")
    with pytest.raises(SettingsError, match=r"RayClient needs Ray 2\.56.*found 2\.55\.1.*pip"):
        RayClient(object())
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"RayClient needs Ray.*pip install"):
        RayClient(object())


def test_no_handle_is_refused():
    with pytest.raises(SettingsError, match="no actor handle"):
        RayClient([])
