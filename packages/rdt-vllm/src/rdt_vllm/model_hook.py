"""A model's own post-processing, which vLLM runs once all modules are in kernel form.

Nothing says whether such a hook works a second time: one that begins with "if done: return" does
not. So it is taken for one that does only when its code merely calls on what is known to.
"""

import dis
import inspect
import re
from types import CodeType, FunctionType
from typing import Any

from torch import nn

__all__ = ["run_model_hook", "unrepeatable_hook"]

_HOOK = "process_weights_after_loading"

# What a hook may be made of: the models that it goes through, and what derives the same from the
# same weights every time.
_MODELS = ("model", "language_model")
_REPEATABLE = frozenset(
    {
        *_MODELS,
        _HOOK,  # of the models that it goes through, which are looked at as well
        "finalize_mega_moe_weights",  # packs experts once, but those of MegaMoE alone: see below
        "finalize_mhc_broadcast_weights",  # copies a sum of weights into a tensor that stays
    }
)
_MEGA_MOE = re.compile(r"use_(\w+_)?mega_moe")


def unrepeatable_hook(model: nn.Module) -> str | None:
    """Why the model's own hook may not work a second time; None when it does, or there is none."""
    hook: Any = getattr(model, _HOOK, None)
    if hook is None:
        return None
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    name = f"{type(model).__name__}.{_HOOK}"
    if not isinstance(function, FunctionType):
        return f"{name}, which is no plain function"
    code = function.__code__
    if unknown := _unknown(code):
        return f"{name} in {function.__module__}:{code.co_firstlineno}, by its {unknown}"
    for path, module in model.named_modules():
        if any(_MEGA_MOE.fullmatch(key) and value for key, value in vars(module).items()):
            return f"{name}, by packing the experts of MegaMoE in {path}"
    if _HOOK in code.co_names:
        for inner in (getattr(model, each, None) for each in _MODELS if each in code.co_names):
            if isinstance(inner, nn.Module) and (reason := unrepeatable_hook(inner)) is not None:
                return reason
    return None


def run_model_hook(model: nn.Module) -> None:
    """What vLLM does last of all after a first load; raises what the hook raises."""
    hook: Any = getattr(model, _HOOK, None)
    if hook is not None:
        hook()


def _unknown(code: CodeType) -> str:
    """The first thing in a hook's code that is none of what is known; empty when there is none."""
    for step in dis.get_instructions(code):
        if step.opname.startswith(("STORE_", "DELETE_", "MAKE_", "IMPORT_", "YIELD")):
            return f"{step.opname} of {step.argrepr or 'something'}"
    return next((name for name in code.co_names if name not in _REPEATABLE), "")
