import torch
from torch import nn

from rdt_vllm.module_tensors import ModuleTensors, own_tensors


def layer() -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.ones(2, 2)))
    module.register_parameter("bias", None)
    module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    module.register_buffer("table", torch.zeros(3), persistent=False)
    module.register_buffer("count", torch.zeros(1))
    module.packed = torch.ones(4)
    return module


def test_own_tensors_leave_out_what_is_none_and_what_children_own() -> None:
    module = layer()
    module.child = layer()

    assert list(own_tensors(module)) == ["weight", "scale", "table", "count"]


def test_put_back_restores_objects_order_persistence_and_hidden_attributes() -> None:
    module = layer()
    parameters, buffers = list(module._parameters.items()), list(module._buffers.items())
    containers = module._parameters, module._buffers, module._non_persistent_buffers_set
    packed = module.packed
    kept = ModuleTensors.of(module, frozenset({"packed", "weight"}))

    for name in ("weight", "scale", "table", "packed"):
        delattr(module, name)
    module.register_buffer("table", torch.ones(9))
    module.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    module.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    module.register_parameter("packed", nn.Parameter(torch.zeros(1)))
    module.__dict__["table"] = module.__dict__["scale"] = torch.zeros(5)
    kept.put_back()

    assert [(k, id(v)) for k, v in module._parameters.items()] == [
        (k, id(v)) for k, v in parameters
    ]
    assert [(k, id(v)) for k, v in module._buffers.items()] == [(k, id(v)) for k, v in buffers]
    assert module._parameters is containers[0]
    assert module._buffers is containers[1]
    assert module._non_persistent_buffers_set is containers[2]
    assert module._non_persistent_buffers_set == {"table"}
    assert module.packed is packed
    assert module.scale is parameters[2][1]
    assert module.table is buffers[0][1]
