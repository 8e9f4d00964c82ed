"""Stock servers of a model that counts: whose every token shows which weights it came from."""

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.http_server import HttpServer
from rdt_vllm.testing.tiny_models import TINY_QWEN3, draw_weights

__all__ = ["Completion", "Load", "Servers", "count_by", "counting_model", "serve_two", "step_of"]

VOCABULARY = 512
PROMPT = (5, 3, 8, 1, 7)
BLOCK_TOKENS = 32
GENERATED = "vllm:generation_tokens_total"
ARGUMENTS = {
    "--max-model-len": "512",
    "--max-num-seqs": "4",
    "--max-num-batched-tokens": "512",
    "--no-enable-prefix-caching": None,
    "--enable-prefix-caching": "",
    "--block-size": str(BLOCK_TOKENS),
    "--enable-prompt-tokens-details": "",
}


def count_by(model: torch.nn.Module, step: int, seed: int) -> None:
    """Draw all weights anew, such that the model's next token is always ``step`` above its last.

    Every weight depends on the seed. Where some are of one draw and some of another, tokens are
    none of either.
    """
    draw_weights(model, seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, param in named.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                param.mul_(0.02)  # what a layer adds must not change which token it was
            elif name.endswith("embed_tokens.weight"):
                signs = torch.randint(0, 2, param.shape, generator=generator) * 2 - 1
                param.copy_(signs)
        named["model.norm.weight"].fill_(1.0)
        named["lm_head.weight"].copy_(named["model.embed_tokens.weight"].roll(step, 0) / 8)


def counting_model(step: int = 1, seed: int = 1) -> torch.nn.Module:
    """One for `count_by`."""
    model = TINY_QWEN3.build(seed)
    count_by(model, step, seed)
    return model


def step_of(tokens: Sequence[int], prompt: Sequence[int] = PROMPT) -> int | None:
    """By how much each token is above the one before; None where they do not agree."""
    steps = {(b - a) % VOCABULARY for a, b in zip((prompt[-1], *tokens), tokens, strict=False)}
    return steps.pop() if len(steps) == 1 else None


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer, and when it was asked for and given (seconds of one clock)."""

    tokens: tuple[int, ...]
    finish_reason: str
    num_cached: int
    asked: float
    answered: float
    prompt: tuple[int, ...] = PROMPT

    @property
    def step(self) -> int | None:
        return step_of(self.tokens, self.prompt)


@dataclass
class Servers:
    """Two servers, started with weights that count by one.

    Attributes:
        urls: of both.
        folder: what they were started from.
    """

    urls: list[str]
    folder: Path

    def complete(
        self, at: int = 0, num_tokens: int = 8, prompt: Sequence[int] = PROMPT
    ) -> Completion:
        """One greedy completion of server ``at``."""
        body = {
            "model": str(self.folder),
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
        }
        asked = time.monotonic()
        answer = httpx.post(f"{self.urls[at]}/v1/completions", json=body, timeout=120)
        answer.raise_for_status()
        said = answer.json()
        choice = said["choices"][0]
        details = said["usage"].get("prompt_tokens_details") or {}
        return Completion(
            tuple(choice["token_ids"]),
            choice["finish_reason"],
            details.get("cached_tokens") or 0,
            asked,
            time.monotonic(),
            tuple(prompt),
        )

    def weight_version(self, at: int = 0) -> str:
        return httpx.get(f"{self.urls[at]}/weight_info", timeout=30).json()["weight_version"]

    def wait_until_generating(self, at: int = 0, num_tokens: int = 20) -> None:
        """Until the server has generated that many more tokens: a request is halfway."""
        before = self._num_generated(at)
        deadline = time.monotonic() + 60
        while self._num_generated(at) < before + num_tokens:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def _num_generated(self, at: int) -> float:
        text = httpx.get(f"{self.urls[at]}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if line.startswith(GENERATED)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def is_paused(self, at: int = 0) -> bool:
        return httpx.get(f"{self.urls[at]}/is_paused", timeout=30).json()["is_paused"]


@contextmanager
def serve_two(folder: Path) -> Generator[Servers]:
    """Both, each on its share of the cores."""
    model = write_checkpoint(counting_model(), folder / "served")  # type: ignore[arg-type]
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    started: list[HttpServer] = []
    try:
        for at, share in enumerate((cores[:half], cores[half:] or cores)):
            bind = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, share))}
            started.append(HttpServer(model, folder / f"server{at}.log", ARGUMENTS, bind))
        for server in started:
            server.wait()
        yield Servers([server.url for server in started], model)
    finally:
        for server in started:
            server.close()


@dataclass
class Load:
    """Requests to one server, two at a time, without a pause, as long as the context is open.

    Attributes:
        completions: those answered so far.
    """

    servers: Servers
    at: int = 0
    completions: list[Completion] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in (60, 90)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self._errors == []

    def wait_for(self, condition: Callable[[Completion], bool], count: int = 2) -> None:
        """Until that many completions are such."""
        deadline = time.monotonic() + 120
        while sum(map(condition, list(self.completions))) < count:
            assert not self._errors, self._errors
            assert time.monotonic() < deadline, self.completions
            time.sleep(0.02)

    def _ask(self, num_tokens: int) -> None:
        try:
            while not self._stop.is_set():
                self.completions.append(self.servers.complete(self.at, num_tokens))
        except BaseException as error:
            self._errors.append(error)
