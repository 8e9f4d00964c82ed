"""Which classes of a quantised layer are admitted; `tests/test_quantised_engine.py` tries them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rdt_vllm.proven_methods import addressed_tensors, describe, is_proven


def instance(class_name: str, base: type = object, **attributes: Any) -> Any:
    made = type(class_name, (base,), {})()
    made.__dict__.update(attributes)
    return made


def layer(
    method: str, scheme: str | None = None, kernel: str | None = None, **config: Any
) -> tuple[nn.Module, Any]:
    """A module with a quantisation method of these classes."""
    module = nn.Module()
    made = None if kernel is None else instance(kernel, config=SimpleNamespace(**config))
    quant_method = instance(method)
    holder = quant_method
    if scheme is not None:
        holder = module.scheme = instance(scheme)
    holder.kernel = made
    module.quant_method = quant_method
    return module, quant_method


INT8 = ("CompressedTensorsLinearMethod", "CompressedTensorsW8A8Int8", "CPUInt8ScaledMMLinearKernel")
SYMMETRIC = {"is_channelwise": True, "is_static_input_scheme": False, "input_symmetric": True}


@pytest.mark.parametrize(
    "classes",
    [
        ("UnquantizedLinearMethod",),
        ("AutoAWQMarlinLinearMethod", None, "CPUWNA16LinearKernel"),
        ("AutoGPTQLinearMethod", None, "CPUWNA16LinearKernel"),
        ("CompressedTensorsKVCacheMethod",),
        ("CompressedTensorsLinearMethod", "CompressedTensorsWNA16", "CPUWNA16LinearKernel"),
    ],
)
def test_what_was_tried_is_proven(classes: tuple[Any, ...]) -> None:
    assert is_proven(*layer(*classes))


def test_what_is_derived_from_an_unquantised_method_is_proven() -> None:
    base = type("UnquantizedFusedMoEMethod", (), {})
    assert is_proven(nn.Module(), instance("Mine", base))


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (("Fp8LinearMethod",), "Fp8LinearMethod"),
        (("AutoAWQMoEMethod",), "AutoAWQMoEMethod"),
        (
            ("AutoGPTQLinearMethod", None, "MarlinLinearKernel"),
            "AutoGPTQLinearMethod on MarlinLinearKernel",
        ),
        (
            ("CompressedTensorsLinearMethod", "CompressedTensorsW8A8Fp8", "CPUWNA16LinearKernel"),
            "CompressedTensorsLinearMethod with CompressedTensorsW8A8Fp8 on CPUWNA16LinearKernel",
        ),
    ],
)
def test_anything_else_is_not_and_is_named(classes: tuple[Any, ...], words: str) -> None:
    module, quant_method = layer(*classes)
    assert not is_proven(module, quant_method)
    assert describe(module, quant_method) == words


@pytest.mark.parametrize(
    ("change", "proven"),
    [
        ({}, True),
        ({"is_static_input_scheme": True}, False),
        ({"input_symmetric": False}, False),
        ({"is_channelwise": False}, False),
    ],
)
def test_int8_is_proven_in_one_form(change: dict[str, bool], proven: bool) -> None:
    assert is_proven(*layer(*INT8, **{**SYMMETRIC, **change})) == proven


def test_forms_of_other_instruction_sets_are_not_proven() -> None:
    module, quant_method = layer("AutoAWQMarlinLinearMethod", None, "CPUWNA16LinearKernel")
    module.use_w4a8 = True
    assert not is_proven(module, quant_method)

    def _apply_weights_sgl() -> None: ...

    module, quant_method = layer(*INT8, **SYMMETRIC)
    module.scheme.kernel.linear_method = _apply_weights_sgl
    assert not is_proven(module, quant_method)


def test_only_a_handler_remembers_addresses() -> None:
    module, _ = layer(*INT8, **SYMMETRIC)
    module.weight_scale = nn.Parameter(torch.ones(3), requires_grad=False)
    assert addressed_tensors(module) == ()
    module.scheme.kernel.dnnl_handler = object()
    (held,) = addressed_tensors(module)
    assert held is module.weight_scale
    assert addressed_tensors(nn.Linear(1, 1)) == ()
