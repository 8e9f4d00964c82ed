"""What servers say, as they say it, in the words of the command."""

import logging

import pytest

from rdt_trainer.push.wording import PlainFormatter, plain

POST = "POST http://host:8000/init_weight_transfer_engine: HTTP 500: "
BEFORE = "Call to collective_rpc method failed: Worker failed with error '"
AFTER = "', please check the stack trace above for the root cause"


def refused(why: str, name: str) -> str:
    return (
        f"{POST}{BEFORE}Qwen3ForCausalLM cannot load the 26 weights that the trainer publishes: "
        f"{why} (while recording the loader of weight {name!r}); do both hold the same model, "
        f"under checkpoint names?{AFTER}"
    )


def lacking(*names: str) -> str:
    lines = [f"  module 'x':\n    {name} (256x128): 32768 elements missing" for name in names]
    return (
        f"{POST}{BEFORE}{len(names)} parameters are not wholly written by the weights; load them, "
        "or exempt them if the engine never does:\n" + "\n".join(lines) + AFTER
    )


def test_a_name_too_many_comes_first_with_the_option_that_allows_it() -> None:
    why = (
        "There is no module or parameter named 'value_head' in Qwen3ForCausalLM. The available "
        "parameters belonging to  (Qwen3ForCausalLM) are: {'lm_head.weight', [...] 'a.b'}"
    )
    assert plain(refused(why, "value_head.weight")) == (
        f"{POST}'value_head.weight' of the checkpoint: There is no module or parameter named "
        "'value_head' in Qwen3ForCausalLM; if no worker needs it: --unconsumed 'value_head.*'; do "
        "both hold the same model, under checkpoint names?"
    )
    said = plain(refused("'layers.2.mlp.weight'", "layers.2.mlp.weight"))
    assert "--unconsumed 'layers.2.mlp.*'" in said


def test_a_shape_that_does_not_fit_is_named_and_not_to_be_allowed() -> None:
    said = plain(refused("The size of tensor a must match", "lm_head.weight"))
    assert said.startswith(f"{POST}'lm_head.weight' of the checkpoint: The size of tensor a")
    assert "--unconsumed" not in said


@pytest.mark.parametrize(("count", "more"), [(1, ""), (5, ""), (8, " and 3 more")])
def test_what_the_checkpoint_lacks_is_named(count: int, more: str) -> None:
    names = [f"model.layers.{at}.weight" for at in range(count)]
    said = plain(lacking(*names))
    assert said.startswith(f"{POST}the checkpoint lacks {', '.join(names[:5])}{more}, or parts")
    assert "exempt" not in said and "\n" not in said


def test_another_trainer_is_detached_by_a_call_that_is_named() -> None:
    said = plain(
        f"{POST}{BEFORE}this worker is attached to job 'a' at b, and job 'c' at d asks for it: "
        "two trainers cannot push into one worker; end the first, or shut its weight transfer "
        f"down{AFTER}"
    )
    assert said.endswith("detach the server from it: POST /shutdown_weight_transfer_engine")


def test_servers_are_called_by_their_urls() -> None:
    assert plain(
        "waited 5 seconds for the end of start() on replica 0 (http://a:1), replica 1 (http://b:2)"
    ) == ("waited 5 seconds for the end of start() on http://a:1, http://b:2")
    record = logging.makeLogRecord(
        {
            "msg": "rank %d, while closing: %s",
            "args": (0, "replica 0 (http://a:1) is still in a call"),
        }
    )
    assert PlainFormatter("%(message)s").format(record) == (
        "while closing: http://a:1 is still in a call"
    )


@pytest.mark.parametrize("text", ["", "no connection", "a '{' of {'x'}", "replica 3 is new"])
def test_whatever_else_is_said_stays(text: str) -> None:
    assert plain(text) == text
