import pytest
import torch

from rdt_plan import ConsumerId, Manifest, ParamMeta, build_plan
from rdt_transport.consumer import Consumer
from rdt_transport.errors import WireError
from rdt_transport.events import Event, HostEvents, check_has_events
from rdt_transport.producer import Producer
from rdt_transport.rendezvous import JobSettings

MANIFEST = Manifest.build([ParamMeta("w", "int8", (1,))])
REASON = "CUDA memory needs CUDA events, which this version does not have; use device='cpu'"


def test_what_the_host_did_has_completed_when_it_is_recorded():
    event: Event = HostEvents().record()

    assert event.query()


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 0)]
)
def test_memory_of_a_gpu_is_refused_by_both_sessions(device):
    with pytest.raises(WireError, match=REASON):
        Producer(None, None, rank=0, manifest=MANIFEST, settings=JobSettings(1), device=device)
    plan = build_plan(MANIFEST, [], ConsumerId(0, 0), num_workers=1)
    with pytest.raises(WireError, match=REASON):
        Consumer(None, None, plan=plan, num_workers=1, on_chunk=print, device=device)


def test_memory_of_any_other_device_is_refused_and_that_of_the_host_is_not():
    with pytest.raises(WireError, match="device 'meta': META memory needs META events"):
        check_has_events("meta")
    check_has_events("cpu")
    check_has_events(torch.device("cpu"))
