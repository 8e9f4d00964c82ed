import pytest

from rdt_vllm.errors import UnsupportedError
from rdt_vllm.refusals import EngineFacts, check_supported


@pytest.mark.parametrize("draft_method", [None, "ngram", "suffix"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_can_be_synced_passes(draft_method: str | None, device: str) -> None:
    check_supported(EngineFacts(draft_method=draft_method, device=device))


@pytest.mark.parametrize(
    ("facts", "reason", "remedy"),
    [
        (EngineFacts(eplb=True), "EPLB", "--enable-eplb"),
        (EngineFacts(draft_method="eagle"), "'eagle'", "--speculative-config"),
        (EngineFacts(lora=True), "LoRA", "merge the adapter"),
        (EngineFacts(offload=True), "offloaded", "without CPU offloading"),
        (EngineFacts(retied_embeddings=True), "tied", "tie_word_embeddings"),
        (EngineFacts(model_hook="Pad.hook at pad:1"), "(Pad.hook at pad:1)", "not supported yet"),
        (EngineFacts(device="xpu"), "'xpu' devices", "use CPUs or CUDA GPUs"),
        (
            EngineFacts(unproven=(("a.b", "Fp8"), ("a.c", "Fp8"), ("", "Int4"))),
            "Fp8 (2 modules, first 'a.b'); Int4 (1 modules, first 'the root')",
            "unquantised",
        ),
    ],
)
def test_each_refusal_says_why_and_what_to_do(facts: EngineFacts, reason: str, remedy: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_supported(facts)

    assert reason in str(caught.value)
    assert remedy in str(caught.value)
