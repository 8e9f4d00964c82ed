from rdt_transport.events import Event, HostEvents


def test_what_the_host_did_has_completed_when_it_is_recorded():
    event: Event = HostEvents().record()

    assert event.query()
