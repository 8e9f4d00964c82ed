"""Who takes part in one sync, as scripts for ``sharded_rdt`` say it: by numbers of consumers.

Consumer c is worker ``c % each`` of deployment ``c // each``, where all have ``each`` workers.
"""

import logging
from collections.abc import Collection, Sequence

from rdt_trainer.client import Client
from rdt_trainer.engine import RdtTrainer
from rdt_trainer.errors import RdtTrainerError, SettingsError
from rdt_transport.errors import RdtTransportError

__all__ = ["LiveDeployments", "live_deployments"]

_logger = logging.getLogger(__name__)


def live_deployments(
    live: Collection[int], num_consumers: int, num_deployments: int
) -> frozenset[int]:
    """The deployments whose consumers these are; the same on every rank.

    Raises `SettingsError` where that is nobody, or not all consumers of a deployment or of none, as
    a deployment without a worker of its own cannot serve; and where nobody said how many there are.
    """
    if not num_consumers:
        raise SettingsError(
            "live_consumer_ids came without num_consumers: expected that in the init info, as it "
            "says which consumers are of which deployment"
        )
    named = set(live)
    if strangers := named - set(range(num_consumers)):
        raise SettingsError(
            f"live_consumer_ids names {min(strangers)}: expected numbers below the "
            f"{num_consumers} of num_consumers"
        )
    each = num_consumers // num_deployments
    found = frozenset(consumer // each for consumer in named)
    if not found:
        raise SettingsError("live_consumer_ids is empty: expected a consumer at least")
    if len(named) < len(found) * each:
        at = min(at for at in found if not named.issuperset(range(at * each, (at + 1) * each)))
        raise SettingsError(
            f"live_consumer_ids names some of consumers {at * each} to {(at + 1) * each - 1}, "
            f"which are the workers of one deployment, client {at}: expected all of them or none; "
            "give a client for each deployment, if they are several"
        )
    return found


class LiveDeployments:
    """Has a trainer's replicas be those of the deployments that are live; only on rank 0.

    Args:
        trainer: initialised with ``clients``, in this order.
        clients: of all deployments.
    """

    def __init__(self, trainer: RdtTrainer, clients: Sequence[Client]) -> None:
        self._trainer = trainer
        self._clients = clients
        self._replicas = dict(enumerate(trainer.replicas))  # by deployment

    def set(self, live: Collection[int]) -> None:
        """Attach and detach what differs. One that does not come goes without, and is logged: the
        other ranks are in the sync already, and the next one tries again."""
        for at in sorted(set(live) - self._replicas.keys()):
            try:
                self._replicas[at] = self._trainer.add_replica(self._clients[at])
            except (RdtTrainerError, RdtTransportError) as error:
                _logger.warning("client %d (%s): %s", at, self._clients[at].name, error)
        for at in sorted(self._replicas.keys() - set(live)):
            if len(self._replicas) > 1:  # the last one stays: who cannot be reached is dropped
                self._trainer.remove_replica(self._replicas.pop(at))
