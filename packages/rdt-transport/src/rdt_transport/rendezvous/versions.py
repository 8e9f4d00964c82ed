"""The check that a worker and its trainer speak one wire version."""

from rdt_transport.errors import VersionMismatchError

__all__ = ["check_wire_version"]


def check_wire_version(consumer: str, consumer_version: int, trainer_version: int) -> None:
    """Raises `VersionMismatchError`, which names both versions and what to upgrade."""
    if consumer_version != trainer_version:
        older = "rdt-vllm of the worker" if consumer_version < trainer_version else "rdt-trainer"
        raise VersionMismatchError(
            f"{consumer} speaks wire version {consumer_version}, the trainer version "
            f"{trainer_version}; upgrade {older}"
        )
