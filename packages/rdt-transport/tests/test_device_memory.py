import torch

from rdt_transport import device_memory
from rdt_transport.device_memory import allocation_of, is_registrable


def test_memory_of_the_host_can_be_registered() -> None:
    assert is_registrable(torch.zeros(3))
    assert is_registrable(torch.empty(0))


class OnGpu:
    """As much of a tensor of a GPU as is looked at, at an address that no driver knows."""

    device = torch.device("cuda", 0)

    def untyped_storage(self) -> "OnGpu":
        return self

    def nbytes(self) -> int:
        return 64

    def data_ptr(self) -> int:
        return 4096


def driver(error: int, answer: int):
    def ask(pointer, attribute, address) -> int:
        assert (attribute.value, address.value) == (10, 4096)
        pointer._obj.value = answer
        return error

    return ask


def test_the_driver_is_asked_and_believed(monkeypatch) -> None:
    for error, answer, expected in ((0, 1, True), (0, 0, False), (1, 0, True)):
        monkeypatch.setattr(device_memory, "_ask", lambda e=error, a=answer: driver(e, a))
        assert is_registrable(OnGpu()) is expected
    monkeypatch.setattr(device_memory, "_ask", lambda: None)
    assert is_registrable(OnGpu())


def test_memory_of_the_host_is_its_own_allocation() -> None:
    whole = torch.zeros(100, dtype=torch.uint8)
    expected = (whole.data_ptr(), 100)
    assert allocation_of(whole[10:20].untyped_storage()) == expected


def test_memory_of_a_gpu_lies_in_the_allocation_that_the_driver_names(monkeypatch) -> None:
    own = (4096, 64)
    for error, start, size, expected in (
        (0, 4096, 64, own),
        (0, 1024, 8192, (1024, 8192)),
        (0, 4096, 32, own),  # one of several mappings: not all of the storage lies in it
        (0, 8192, 8192, own),
        (0, 0, 0, own),
        (1, 1024, 8192, own),
    ):

        def ask(pointer, attribute, address, error=error, answers=(start, size)) -> int:
            assert address.value == 4096
            pointer._obj.value = answers[(11, 12).index(attribute.value)]
            return error

        monkeypatch.setattr(device_memory, "_ask", lambda ask=ask: ask)
        assert allocation_of(OnGpu()) == expected
    monkeypatch.setattr(device_memory, "_ask", lambda: None)
    assert allocation_of(OnGpu()) == own
