"""The probe with a way of its own to fill a model: vLLM's layerwise reload from a folder.

It is what the probe is tested with, and a baseline: a reload that the probe refuses is a defect of
vLLM's reload, not of a sync.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from rdt_vllm.testing.checkpoint import WEIGHTS_FILE
from rdt_vllm.testing.exactness import ExactnessProbe, answering

__all__ = ["ReloadProbe"]

Observer = Callable[[str, nn.Module], None]


class ReloadProbe(ExactnessProbe):
    """As ``worker_extension_cls``: ``rdt_vllm.testing.reload_probe.ReloadProbe``."""

    @answering
    def rdt_reload(self, folder: str, leave_out: str = "") -> None:
        """Reload from ``folder`` before the probe's eyes, without names that contain ``leave_out``.

        An empty ``leave_out`` leaves out nothing; otherwise those modules go stale.
        """
        weights = load_file(f"{folder}/{WEIGHTS_FILE}")
        kept = [(name, w) for name, w in weights.items() if not leave_out or leave_out not in name]
        snapshots = self._rdt_snapshots()
        snapshots.clear()
        model = self.model_runner.get_model()
        with torch.no_grad(), _shown_when_filled(model, snapshots.observe) as shown:
            self.reload_weights(weights_iterator=iter(kept))  # type: ignore[attr-defined]
            for name, module in model.named_modules():
                if module not in shown and module._parameters and _is_among(name, kept):
                    snapshots.observe(
                        name, module
                    )  # nothing post-processes it: it still is as filled


def _is_among(module: str, weights: list[tuple[str, torch.Tensor]]) -> bool:
    return any(name.startswith(f"{module}.") for name, _ in weights)


@contextmanager
def _shown_when_filled(model: nn.Module, observe: Observer) -> Generator[set[nn.Module]]:
    """Show each module right before its method post-processes it; yields those shown so far."""
    names = {module: name for name, module in model.named_modules()}
    shown: set[nn.Module] = set()
    with ExitStack() as stack:
        methods: dict[int, Any] = {id(m.quant_method): m.quant_method for m in names if _method(m)}
        for method in methods.values():
            stock = method.process_weights_after_loading

            def showing(layer: nn.Module, stock: Any = stock) -> None:
                observe(names[layer], layer)
                shown.add(layer)
                stock(layer)

            method.process_weights_after_loading = showing
            stack.callback(vars(method).pop, "process_weights_after_loading")
        yield shown


def _method(module: nn.Module) -> Any:
    return getattr(getattr(module, "quant_method", None), "process_weights_after_loading", None)
