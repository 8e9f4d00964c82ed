"""What is refused at init, with the reason and the remedy, rather than synced wrongly."""

from collections import Counter
from dataclasses import dataclass

from rdt_vllm.errors import UnsupportedError

__all__ = ["EngineFacts", "check_supported"]

# Speculative methods that hold no weights of their own.
_WEIGHTLESS_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix"})


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine's configuration and model ask for.

    Attributes:
        eplb: experts move between workers while serving.
        draft_method: vLLM's name of the speculative method; None without speculation.
        lora: adapters may be loaded.
        offload: weights live outside of the device.
        retied_embeddings: the configuration ties the embeddings, the checkpoint does not, and vLLM
            compares the two at load time.
        model_hook: why the model's own post-processing may not work twice, if so.
        device: type of the devices that hold the weights.
        unproven: modules, each with the class whose post-processing may not work twice.
    """

    eplb: bool = False
    draft_method: str | None = None
    lora: bool = False
    offload: bool = False
    retied_embeddings: bool = False
    model_hook: str | None = None
    device: str = "cpu"
    unproven: tuple[tuple[str, str], ...] = ()


def check_supported(facts: EngineFacts) -> None:
    """Raise `UnsupportedError` for the first thing that cannot be synced correctly yet."""
    for applies, reason in (
        (
            facts.eplb,
            "expert load balancing (EPLB) moves experts after their places were recorded, so "
            "weights would land in the wrong experts: start vLLM without --enable-eplb",
        ),
        (
            facts.draft_method is not None and facts.draft_method not in _WEIGHTLESS_DRAFTS,
            f"the draft model of speculative method {facts.draft_method!r} would keep its old "
            "weights: start vLLM without --speculative-config, or with method ngram or suffix",
        ),
        (
            facts.lora,
            "LoRA wraps the modules whose loaders are recorded: merge the adapter in the trainer "
            "and start vLLM without --enable-lora",
        ),
        (
            facts.offload,
            "offloaded weights are not where kernels expect them while they are replaced: start "
            "vLLM without CPU offloading of weights",
        ),
        (
            facts.retied_embeddings,
            "the configuration says that word embeddings are tied, the checkpoint holds both, and "
            "vLLM ties them only while they are equal: set tie_word_embeddings to what the trainer "
            "does in the checkpoint's config.json",
        ),
        (
            facts.model_hook is not None,
            f"the model post-processes its weights as a whole, which may not work twice "
            f"({facts.model_hook}): this architecture is not supported yet",
        ),
        (
            facts.device not in ("cpu", "cuda"),
            f"weights are not installed on {facts.device!r} devices yet: use CPUs or CUDA GPUs",
        ),
        (
            bool(facts.unproven),
            f"post-processing may not work a second time for {_grouped(facts.unproven)}: serve "
            "unquantised weights, or on a CPU dense ones in AWQ, GPTQ, or compressed-tensors' int4 "
            "or int8 with a scale a channel",
        ),
    ):
        if applies:
            raise UnsupportedError(f"backend 'rdt' refuses this engine: {reason}")


def _grouped(unproven: tuple[tuple[str, str], ...]) -> str:
    """One phrase a class, with how many modules have it and the first of them."""
    counts = Counter(kind for _, kind in unproven)
    first = {kind: name for name, kind in reversed(unproven)}
    return "; ".join(
        f"{kind} ({count} modules, first {first[kind] or 'the root'!r})"
        for kind, count in counts.items()
    )
