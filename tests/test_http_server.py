"""Stock servers, started from the command line and driven over HTTP, follow a trainer.

No completion mixes old and new weights; what goes wrong in a worker is told in its own words.
"""

import threading
from collections.abc import Iterator

import pytest
import torch

from rdt_trainer import ClientError, HttpClient, ModuleSource, RdtTrainer, SourceMeta
from rdt_trainer.client import PauseMode
from tests.http_servers import (
    BLOCK_TOKENS,
    PROMPT,
    Load,
    Servers,
    count_by,
    counting_model,
    step_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TIMEOUT_SECONDS = 120.0
LONG_PROMPT = (*range(100, 100 + 2 * BLOCK_TOKENS), 9)  # two blocks of cache, and one token


@pytest.fixture
def model(servers: Servers) -> torch.nn.Module:
    """A trainer's module; every test sends weights of its own first."""
    return counting_model()


@pytest.fixture
def client(servers: Servers) -> Iterator[HttpClient]:
    """Of the first server, which serves on in the end, whatever a test did to it."""
    with HttpClient(servers.urls[0], timeout_seconds=TIMEOUT_SECONDS) as client:
        yield client
        client.pause("abort")
        client.reset_prefix_cache()
        client.resume()


@pytest.fixture
def trainer(client: HttpClient, model: torch.nn.Module) -> Iterator[RdtTrainer]:
    """Attached to the first server."""
    source = ModuleSource(model)
    with RdtTrainer(source, client, timeout_seconds=TIMEOUT_SECONDS) as trainer:
        trainer.init()
        yield trainer


def test_the_instrument_tells_whose_weights_a_token_came_from() -> None:
    assert step_of((8, 9, 10)) == 1
    assert step_of((9, 11, 13)) == 2
    assert step_of((8, 9, 11)) is None
    assert step_of((9, 10)) is None
    old, new = counting_model(1, 1), counting_model(2, 2)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        mixed = counting_model(1, 1)
        mixed.get_parameter(name).data.copy_(new.get_parameter(name))
        tokens = torch.tensor([PROMPT])
        following = [int(each(tokens).logits[0, -1].argmax()) for each in (old, mixed)]
        assert following[0] == PROMPT[-1] + 1
        assert step_of(following[1:]) not in (1, 2)


def test_completions_follow_the_trainer_and_outlive_it(
    servers: Servers, client: HttpClient, model: torch.nn.Module
) -> None:
    client.shutdown()  # of a server that was never attached, or is no more
    with pytest.raises(ClientError, match="init_weight_transfer_engine has not succeeded"):
        client.start()
    with RdtTrainer(ModuleSource(model), client, timeout_seconds=TIMEOUT_SECONDS) as trainer:
        trainer.init()
        for step, version in ((1, None), (2, "two"), (3, None), (4, "four")):
            count_by(model, step, seed=step)
            trainer.send_weights(version)
            assert servers.complete().step == step
            assert servers.weight_version() == version or str(step)
    assert servers.complete().step == 4


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_no_completion_mixes_old_and_new_weights(
    servers: Servers,
    client: HttpClient,
    trainer: RdtTrainer,
    model: torch.nn.Module,
    mode: PauseMode,
) -> None:
    count_by(model, 1, seed=1)
    trainer.send_weights("by 1")
    client.reset_prefix_cache()
    with Load(servers) as load:
        for step in (2, 3):
            before = len(load.completions)
            load.wait_for(lambda each: True, before + 2)
            assert servers.weight_version() == f"by {step - 1}"
            count_by(model, step, seed=step)
            num_asked = len(load.completions)
            client.pause(mode)
            assert servers.is_paused()
            trainer.send_weights(f"by {step}")
            client.reset_prefix_cache()
            client.resume()
            assert servers.weight_version() == f"by {step}"
            load.wait_for(lambda each, step=step: each.step == step)
            asked = [each.step for each in load.completions[:num_asked] if each.tokens]
            assert set(asked) <= set(range(1, step))

    steps = [each.step for each in load.completions if each.tokens]  # some are aborted unbegun
    assert set(steps) == {1, 2, 3}, load.completions
    assert steps == sorted(steps, key=lambda step: step or 0)
    reasons = {each.finish_reason for each in load.completions}
    assert reasons == ({"length", "abort"} if mode == "abort" else {"length"})


@pytest.mark.parametrize("aborts", [True, False])
def test_requests_that_a_pause_keeps_mix_unless_they_are_aborted(
    servers: Servers,
    client: HttpClient,
    trainer: RdtTrainer,
    model: torch.nn.Module,
    aborts: bool,
) -> None:
    """What vLLM's mode is for; here it also shows that a mixture would be seen."""
    count_by(model, 1, seed=1)
    trainer.send_weights()
    client.reset_prefix_cache()
    kept = []
    asking = threading.Thread(target=lambda: kept.append(servers.complete(0, 400)))
    asking.start()
    servers.wait_until_generating()
    client.pause("keep")
    count_by(model, 2, seed=2)
    trainer.send_weights()
    if aborts:
        client.pause("abort")
    client.reset_prefix_cache()
    client.resume()
    asking.join()
    (completion,) = kept
    assert completion.finish_reason == ("abort" if aborts else "length")
    assert completion.step == (1 if aborts else None)
    assert step_of(completion.tokens[:2]) == 1
    assert step_of(completion.tokens[-1:], completion.tokens[:-1]) == (1 if aborts else 2)
    assert servers.complete().step == 2


def test_nothing_cached_of_old_weights_is_used(
    servers: Servers, client: HttpClient, trainer: RdtTrainer, model: torch.nn.Module
) -> None:
    count_by(model, 1, seed=1)
    trainer.send_weights()
    client.reset_prefix_cache()
    assert servers.complete(prompt=LONG_PROMPT).num_cached == 0
    assert servers.complete(prompt=LONG_PROMPT).num_cached == 2 * BLOCK_TOKENS
    client.pause("wait")
    count_by(model, 2, seed=2)
    trainer.send_weights()
    client.reset_prefix_cache()
    client.resume()
    fresh = servers.complete(prompt=LONG_PROMPT)
    assert (fresh.num_cached, fresh.step) == (0, 2)


def test_two_servers_of_one_job_follow_together(
    servers: Servers, client: HttpClient, model: torch.nn.Module
) -> None:
    with (
        HttpClient(servers.urls[1], timeout_seconds=TIMEOUT_SECONDS) as other,
        RdtTrainer(
            ModuleSource(model), [client, other], timeout_seconds=TIMEOUT_SECONDS
        ) as trainer,
    ):
        trainer.init()
        for step in (5, 6):
            count_by(model, step, seed=step)
            for each in (client, other):
                each.pause("wait")
            report = trainer.send_weights(f"by {step}")
            for each in (client, other):
                each.reset_prefix_cache()
                each.resume()
            assert (report.committed, report.dropped) == ((0, 1), {})
            assert [servers.complete(at).step for at in (0, 1)] == [step, step]
            assert [servers.weight_version(at) for at in (0, 1)] == [f"by {step}"] * 2


class Changed:
    """A source with one more tensor, or one of another shape."""

    def __init__(self, model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        self._tensors = {**dict(ModuleSource(model).iter_full()), name: tensor}

    @property
    def metadata(self) -> list[SourceMeta]:
        return [
            SourceMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in sorted(self._tensors.items())
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(sorted(self._tensors.items()))


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("model.layers.0.no_such_module.weight", (2, 2), r"no_such_module"),
        ("model.norm.weight", (7,), r"model\.norm\.weight"),
    ],
)
def test_what_a_worker_refuses_is_told_in_its_words(
    servers: Servers,
    client: HttpClient,
    model: torch.nn.Module,
    name: str,
    shape: tuple[int, ...],
    told: str,
) -> None:
    source = Changed(model, name, torch.zeros(shape, dtype=torch.bfloat16))
    with RdtTrainer(source, client, timeout_seconds=TIMEOUT_SECONDS) as trainer:
        with pytest.raises(ClientError, match=r"HTTP 500: .*" + told) as caught:
            trainer.init()
    assert caught.value.status == 500
    assert caught.value.server_text in str(caught.value)
    assert servers.complete().finish_reason == "length"  # goes on serving


def test_a_second_trainer_is_refused_while_the_first_is_there(
    client: HttpClient, trainer: RdtTrainer, model: torch.nn.Module
) -> None:
    with RdtTrainer(ModuleSource(model), client, timeout_seconds=TIMEOUT_SECONDS) as second:
        with pytest.raises(ClientError, match="two trainers cannot push into one worker"):
            second.init()
    with pytest.raises(ClientError, match=r"names session"):
        client.start()
        client.update({"session": "ab" * 16, "epoch": 1})
