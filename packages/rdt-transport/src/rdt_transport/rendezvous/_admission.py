"""What a subscription is refused for: its replica, its place there, and its chunk tables."""

from collections.abc import Collection, Iterable

from rdt_plan.records import Subscription
from rdt_transport.errors import DisagreementError
from rdt_transport.rendezvous.sealed import SealedSubscription
from rdt_transport.rendezvous.settings import JobSettings

__all__ = ["check_subscription"]


def check_subscription(
    sealed: SealedSubscription,
    settings: JobSettings,
    replicas: Collection[int],
    mates: Iterable[Subscription],
) -> None:
    """Raises `DisagreementError`. ``mates`` are the workers of its replica that are subscribed."""
    new = sealed.head
    consumer = new.consumer
    if consumer.replica not in replicas:
        raise DisagreementError(
            f"consumer {consumer} is of no replica of the job, whose replicas are "
            f"{sorted(replicas)}; have its trainer add it (RdtTrainer.add_replica)"
        )
    if consumer.worker >= new.num_workers:
        raise DisagreementError(
            f"consumer {consumer} is outside of its replica's {new.num_workers} workers, which "
            "count from 0; give num_workers, those of the whole deployment"
        )
    for other in mates:
        if other.num_workers != new.num_workers:
            raise DisagreementError(
                f"consumer {other.consumer} says its replica has {other.num_workers} workers, "
                f"{consumer} says {new.num_workers}; two deployments share replica "
                f"{consumer.replica}: give each its own"
            )
    for table in sealed.tables:
        if table.owner >= settings.num_producers or table.num_slots != settings.num_slots:
            raise DisagreementError(
                f"consumer {consumer} wants {table.num_slots} slots of producer {table.owner}; "
                f"the job has {settings.num_slots} slots and {settings.num_producers} "
                "producers; build the plan with the settings of the job that the rendezvous "
                "describes"
            )
