import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from rdt_trainer.adapters import refuse_foreign_tensor
from rdt_trainer.errors import SourceError
from rdt_trainer.module_tensors import module_tensors


class LoraLinear(nn.Module):
    """Looks like what PEFT puts in the place of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4)})


class Packed(torch.Tensor):
    """Looks like the tensor of a quantisation library."""


def packed() -> torch.Tensor:
    return torch.zeros(4).as_subclass(Packed)


@pytest.mark.parametrize(
    ("name", "child"),
    [
        ("base_layer", nn.Linear(2, 2)),
        ("lora_A", nn.Linear(2, 2)),
        ("lora_embedding_A", nn.ParameterDict({"default": nn.Parameter(torch.zeros(2))})),
        ("lora_magnitude_vector", nn.Linear(2, 2)),
        ("ia3_l", nn.Parameter(torch.zeros(2))),
        ("modules_to_save", nn.ModuleDict({"default": nn.Linear(2, 2)})),
        ("oft_R", nn.Parameter(torch.zeros(2))),
    ],
)
def test_adapters_are_refused_by_name(name, child):
    layer = nn.Module()
    setattr(layer, name, child)
    with pytest.raises(SourceError, match=rf"^0\.{name} .*adapter.*merge_and_unload\(\)"):
        module_tensors(nn.Sequential(layer), persistent_buffers=False)


def test_a_layer_with_an_adapter_is_refused_and_a_merged_one_served():
    layer = LoraLinear()
    with pytest.raises(SourceError, match=r"^0\.base_layer .*merge first"):
        module_tensors(nn.Sequential(layer), persistent_buffers=False)
    assert list(module_tensors(nn.Sequential(layer.base_layer), persistent_buffers=False))


def test_any_module_of_peft_is_refused():
    prompted = type("PeftModelForCausalLM", (nn.Linear,), {"__module__": "peft.peft_model"})
    with pytest.raises(SourceError, match=r"the module \(peft\.peft_model\.PeftModelForCausalLM\)"):
        module_tensors(prompted(2, 2), persistent_buffers=False)


def test_names_that_only_remind_of_adapters_are_served():
    honest = nn.ModuleDict({"q_lora_proj": nn.Linear(2, 2), "prompt_encoder": nn.Linear(2, 2)})
    assert len(module_tensors(honest, persistent_buffers=False)) == 4


def test_foreign_tensors_are_refused_by_name():
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(packed(), requires_grad=False)
    with pytest.raises(SourceError, match=r"^0\.weight is a .*\.Packed: expected a plain.*quant"):
        module_tensors(nn.Sequential(layer), persistent_buffers=False)
    layer = nn.Module()
    layer.register_buffer("scales", packed())
    with pytest.raises(SourceError, match=r"^scales is a .*Packed"):
        module_tensors(layer, persistent_buffers=True)


@pytest.mark.parametrize("tensor", [torch.zeros(2), nn.Parameter(torch.zeros(2)), nn.Buffer()])
def test_plain_tensors_pass(tensor):
    refuse_foreign_tensor("w", tensor)


def test_a_dtensor_is_as_plain_as_its_pieces(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        refuse_foreign_tensor("w", DTensor.from_local(torch.zeros(4), mesh, [Replicate()]))
        with pytest.raises(SourceError, match=r"w is a .*Packed"):
            refuse_foreign_tensor("w", DTensor.from_local(packed(), mesh, [Replicate()]))
    finally:
        torch.distributed.destroy_process_group()
