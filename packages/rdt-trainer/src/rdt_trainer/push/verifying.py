"""What every worker should find: checksums of the slices it reads, out of the checkpoint itself."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rdt_plan import Subscription
from rdt_transport.checksums import chunk_checksums, sync_key

__all__ = ["checksums_by_replica"]


def checksums_by_replica(
    subscriptions: Iterable[Subscription],
    source_of: Callable[[str], torch.Tensor],
    on_bytes: Callable[[int], None],
) -> dict[int, dict[str, Any]]:
    """By replica, what its workers' ``update_info`` gets as ``checksums``, under one fresh key.

    Workers of equal plans read the same slices, which are read from the checkpoint once for all.
    ``on_bytes`` is told how many bytes of each chunk were.
    """
    key = sync_key()
    known: dict[tuple[str, int], list[str]] = {}
    found: dict[int, dict[str, Any]] = {}
    for each in subscriptions:
        workers = found.setdefault(each.consumer.replica, {"key": key, "workers": {}})["workers"]
        for table in each.tables:
            plan = (table.plan_digest, table.owner)
            if plan not in known:
                known[plan] = []
                texts = chunk_checksums(table, bytes.fromhex(key), source_of)
                for chunk, text in zip(table.chunks, texts, strict=True):
                    known[plan].append(text)
                    on_bytes(chunk.num_bytes)
            by_owner = workers.setdefault(str(each.consumer.worker), {})
            by_owner[str(table.owner)] = known[plan]
    return found
