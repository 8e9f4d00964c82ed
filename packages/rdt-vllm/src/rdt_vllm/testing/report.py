"""Whether a deployment is exact: the question, asked from beside the engine, and its answer.

`check_exact` takes anything with the two methods of `Engine`; ``vllm.LLM`` has them. The engine
must run `rdt_vllm.testing.exactness.ExactnessProbe` as its ``worker_extension_cls``, with
``enforce_eager`` and without prefix caching. Importing this module imports neither vLLM nor torch.

    observe(llm)
    trainer.send_weights()
    check_exact(llm, checkpoint_of_what_was_sent).require()
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rdt_vllm.errors import RdtVllmError

__all__ = [
    "DEFAULT_PROMPT",
    "PROBE",
    "Engine",
    "ExactnessReport",
    "Mismatch",
    "NotExactError",
    "ProbeError",
    "WorkerReport",
    "ask",
    "check_exact",
    "check_tensors",
    "greedy_tokens",
    "observe",
]

PROBE = "rdt_vllm.testing.exactness.ExactnessProbe"
DEFAULT_PROMPT = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377)
_SHOWN = 8  # mismatches that a message lists


class NotExactError(RdtVllmError, AssertionError):
    """A worker's weights or logits are not, bit for bit, what its own loaders make of them."""


class ProbeError(RdtVllmError):
    """A worker could not answer: asked out of order, or configured so that there is no answer."""


class Engine(Protocol):
    """What `check_exact` needs of a serving engine; ``vllm.LLM`` is one."""

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]: ...

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One difference: a tensor's dotted path (or ``logits[call]``), and its first unequal byte.

    ``first_byte`` is None where there was nothing to compare bit by bit; ``reason`` says why.
    """

    path: str
    first_byte: int | None
    reason: str

    def __str__(self) -> str:
        where = "" if self.first_byte is None else f" from byte {self.first_byte}"
        return f"{self.path}{where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What was compared in one worker, in bytes, and what differed.

    Attributes:
        worker: position in the engine's world.
        modules_observed: modules that the last sync filled before the observer's eyes.
        bytes_unpacked: all of the worker's parameters, as they are before post-processing.
        bytes_compared: of these, what was compared with the fresh model's.
        live_bytes_compared: parameters and buffers compared as they serve.
        logits_bytes: logits compared; 0 on workers that leave them to another.
        logits_digest: SHA-256 of the live model's logits; empty where there are none.
    """

    worker: int
    modules_observed: int
    bytes_unpacked: int
    bytes_compared: int
    live_bytes_compared: int
    logits_bytes: int
    logits_digest: str
    mismatches: tuple[Mismatch, ...]

    def to_rpc(self) -> dict[str, Any]:
        """Builtin types only, which any executor can carry."""
        return asdict(self)

    @classmethod
    def from_rpc(cls, fields: dict[str, Any]) -> "WorkerReport":
        """The inverse of `to_rpc`."""
        mismatches = tuple(Mismatch(**mismatch) for mismatch in fields["mismatches"])
        return replace(cls(**fields), mismatches=mismatches)

    @property
    def ok(self) -> bool:
        """All of its bytes were compared, and none differed."""
        return 0 < self.bytes_unpacked == self.bytes_compared and not self.mismatches


@dataclass(frozen=True, slots=True)
class ExactnessReport:
    """The answer for all workers of one engine, and what they generated from the prompt."""

    workers: tuple[WorkerReport, ...]
    tokens: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Every worker is exact, and at least one compared logits."""
        return all(worker.ok for worker in self.workers) and self.logits_bytes > 0

    @property
    def bytes_compared(self) -> int:
        return sum(worker.bytes_compared for worker in self.workers)

    @property
    def logits_bytes(self) -> int:
        return sum(worker.logits_bytes for worker in self.workers)

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """Those of all workers, in the workers' order."""
        return tuple(mismatch for worker in self.workers for mismatch in worker.mismatches)

    @property
    def logits_digest(self) -> str:
        """Of the first worker that has logits; equal weights and prompts give equal digests."""
        return next((w.logits_digest for w in self.workers if w.logits_digest), "")

    def require(self) -> "ExactnessReport":
        """This report, or `NotExactError` that says what differs."""
        if not self.ok:
            raise NotExactError(str(self))
        return self

    def __str__(self) -> str:
        """A line a worker, and the first few mismatches of each."""
        lines = ["exact" if self.ok else "NOT exact"]
        if not self.logits_bytes:
            lines.append("no worker compared any logits")
        for worker in self.workers:
            lines.append(
                f"worker {worker.worker}: {worker.bytes_compared} of {worker.bytes_unpacked} "
                f"parameter bytes in {worker.modules_observed} modules, "
                f"{worker.live_bytes_compared} serving bytes, {worker.logits_bytes} logits bytes, "
                f"{len(worker.mismatches)} mismatches"
            )
            lines += [f"  {mismatch}" for mismatch in worker.mismatches[:_SHOWN]]
        return "\n".join(lines)


def ask(
    llm: Engine, method: str, args: tuple[Any, ...] = (), timeout_seconds: float = 60.0
) -> list[Any]:
    """What all workers answer to one of the probe's methods, in their order.

    Raises `ProbeError` that names the first worker which could not, and its reason.
    """
    answers = llm.collective_rpc(method, timeout_seconds, args)
    for worker, answer in enumerate(answers):
        if answer["error"] is not None:
            raise ProbeError(f"worker {worker}, {method}: {answer['error']}")
    return [answer["value"] for answer in answers]


def observe(llm: Engine, on: bool = True, *, timeout_seconds: float = 60.0) -> None:
    """Start to copy what the next syncs fill, and forget earlier copies; or stop.

    Call it before every sync that is to be checked: what that sync leaves out then shows. Raises
    `ProbeError` when the engine has no weight transfer that can be observed.
    """
    ask(llm, "rdt_observe", (on,), timeout_seconds)


def greedy_tokens(llm: Engine, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """The ``num_tokens`` most likely next tokens, one after another.

    The prompt's own logits are computed too, so that a tap in the workers sees those of every
    position.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=1,
    )
    outputs = llm.generate({"prompt_token_ids": list(prompt)}, sampling, use_tqdm=False)
    return tuple(outputs[0].outputs[0].token_ids)


def check_tensors(
    llm: Engine, checkpoint: Path | str, *, flip: str | None = None, timeout_seconds: float = 120.0
) -> tuple[WorkerReport, ...]:
    """The first half of `check_exact`, for models whose forward this device cannot run.

    One report a worker, without logits; each must be ``ok``. Arguments and errors as there.
    """
    try:
        ask(llm, "rdt_compare_tensors", (str(checkpoint), flip), timeout_seconds)
        reports = ask(llm, "rdt_tensor_report", (), timeout_seconds)
    finally:
        ask(llm, "rdt_release", (), timeout_seconds)
    return tuple(map(WorkerReport.from_rpc, reports))


def check_exact(
    llm: Engine,
    checkpoint: Path | str,
    *,
    prompt: Sequence[int] = DEFAULT_PROMPT,
    num_tokens: int = 4,
    flip: str | None = None,
    timeout_seconds: float = 120.0,
) -> ExactnessReport:
    """Hold every worker against a model that loads ``checkpoint`` in that worker.

    Each worker builds a second model, which loads the folder with vLLM's own loaders. Compared
    are (a) every parameter as `observe` saw it filled, before post-processing, with the second
    model's at that point; every tensor that serves, after it; and (b) the logits of ``prompt``
    and of ``num_tokens`` greedy tokens, from the live model and then from the second one, through
    the same engine. The live model serves again when this returns or raises. No request of
    anybody else may run meanwhile.

    Args:
        llm: an engine whose workers have the probe, idle, with its weights installed.
        checkpoint: folder with the weights as safetensors, readable by every worker.
        prompt: token ids within the vocabulary; with ``num_tokens`` within the model's length.
        flip: dotted path of one of the *second* model's parameters. One byte of it is changed
            after loading, to show that the comparison of tensors and that of logits can fail.
        timeout_seconds: for each call to the workers.

    Raises:
        ProbeError: a worker has no second model to compare with: the folder lacks a weight, say.
    """
    tokens = {}
    try:
        ask(llm, "rdt_compare_tensors", (str(checkpoint), flip), timeout_seconds)
        for model in ("fresh", "live"):
            ask(llm, "rdt_serve", (model,), timeout_seconds)
            tokens[model] = greedy_tokens(llm, prompt, num_tokens)
        reports = ask(llm, "rdt_report", (), timeout_seconds)
    finally:
        ask(llm, "rdt_release", (), timeout_seconds)
    return ExactnessReport(tuple(WorkerReport.from_rpc(r) for r in reports), tokens["live"])
