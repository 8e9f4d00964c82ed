"""What an `RdtTrainer` is given: checked before anything is opened."""

from collections.abc import Iterable, Sequence

from rdt_trainer.client import Client, declared_workers
from rdt_trainer.errors import SettingsError
from rdt_transport.errors import WireError
from rdt_transport.rendezvous import JobSettings
from rdt_transport.wire.choice import WireChoice

__all__ = [
    "MAX_SECONDS",
    "check_arguments",
    "check_client",
    "checked_seconds",
    "checked_wire",
    "listed",
]

MAX_SECONDS = 7 * 86400.0  # what waits can be given; infinite ones cannot


def listed(client: Client | Sequence[Client] | None) -> list[Client]:
    """The clients of replicas 0, 1, ..."""
    if client is None:
        return []
    return list(client) if isinstance(client, Sequence) else [client]


def check_arguments(
    rank: int, clients: Sequence[Client], settings: JobSettings, timeout_seconds: float
) -> None:
    """Raises `SettingsError` where they contradict each other, or waits would have no end."""
    checked_seconds("timeout_seconds", timeout_seconds)
    if not 0 <= rank < settings.num_producers:
        raise SettingsError(
            f"rank {rank} is not among the {settings.num_producers} producers: expected 0 to "
            f"{settings.num_producers - 1}; set JobSettings.num_producers to the number of ranks"
        )
    if rank > 0 and clients:
        raise SettingsError(f"rank {rank} was given a client: expected one on rank 0 only")
    if rank == 0 and len(clients) != settings.num_replicas:
        raise SettingsError(
            f"rank 0 was given {len(clients)} clients for {settings.num_replicas} replicas: "
            "expected one client a replica"
        )
    for place, client in enumerate(clients):
        check_client(client, clients[:place])


def check_client(client: Client, others: Iterable[Client]) -> None:
    """Raises `SettingsError` for a number of workers that none has, and for one of ``others``."""
    if (num_workers := declared_workers(client)) < 0:
        raise SettingsError(
            f"{client.name}: num_workers is {num_workers}: expected the deployment's workers, "
            "or 0 to let them tell"
        )
    if any(client is other for other in others):
        raise SettingsError(
            f"{client.name} is a replica already: expected a client of its own for each "
            "deployment, as workers are of one replica; use attach() to attach them again"
        )


def checked_wire(name: str) -> WireChoice:
    """Raises `SettingsError` for a name that is no wire's."""
    try:
        return WireChoice.parse(name)
    except WireError as error:
        raise SettingsError(f"the argument wire=: {error}") from error


def checked_seconds(name: str, seconds: float) -> float:
    """Raises `SettingsError` where no wait can be that long: every one has an end."""
    if not isinstance(seconds, int | float) or not 0 < seconds <= MAX_SECONDS:
        raise SettingsError(
            f"{name} is {seconds}: expected seconds, more than 0 and no more than "
            f"{MAX_SECONDS:g}, as every wait ends"
        )
    return seconds
