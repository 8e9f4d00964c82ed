import threading

import pytest
import torch

from rdt_plan import ConsumerId, Manifest, ParamMeta, build_plan
from rdt_transport.consumer import Consumer
from rdt_transport.errors import WireError
from rdt_transport.events import Event, Events, HostEvents, check_has_events, events_of
from rdt_transport.producer import Producer
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import JobSettings
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

MANIFEST = Manifest.build([ParamMeta("w", "int8", (1,))])

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_what_the_host_did_has_completed_when_it_is_recorded():
    event: Event = HostEvents().record()

    assert event.query()


def test_the_host_has_one_stream_and_nothing_to_wait_for():
    events: Events = events_of("cpu")

    for bind in (events.bind, events.bind_with_stream):
        bind()
        with events.stream():
            events.wait(events.record())


@without_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_memory_of_a_gpu_that_is_not_there_is_refused_wherever_it_is_asked_for(device):
    plan = build_plan(MANIFEST, [], ConsumerId(0, 0), num_workers=1)
    fabric = InProcessFabric()
    before = threading.active_count()
    for make in (
        lambda: events_of(device),
        lambda: Producer(
            None, None, rank=0, manifest=MANIFEST, settings=JobSettings(1), device=device
        ),
        lambda: Consumer(None, None, plan=plan, num_workers=1, on_chunk=print, device=device),
        lambda: ProgressThread(lambda: InProcessWire(fabric, "a"), name="a", device=device),
    ):
        with pytest.raises(WireError, match="finds no GPU; use device='cpu', or install a build"):
            make()
    assert threading.active_count() == before


def test_memory_of_any_other_device_is_refused_by_name():
    reason = "device 'meta': META memory needs META events, .* use device='cpu' or 'cuda'"
    with pytest.raises(WireError, match=reason):
        check_has_events("meta")
    with pytest.raises(WireError, match=reason):
        Producer(None, None, rank=0, manifest=MANIFEST, settings=JobSettings(1), device="meta")
    for device in ("cpu", torch.device("cpu"), "cuda", "cuda:3"):
        check_has_events(device)
