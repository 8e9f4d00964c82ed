"""Which consumer a worker is."""

from rdt_plan import ConsumerId
from rdt_vllm.errors import InitInfoError

__all__ = ["worker_identity"]


def worker_identity(
    *,
    data_parallel_index: int,
    data_parallel_size: int,
    world_size: int,
    rank: int,
    replica: int,
    num_replicas: int,
    num_workers: int = 0,
) -> tuple[ConsumerId, int]:
    """The consumer that a worker is, and how many workers its replica has.

    Args:
        data_parallel_index: data-parallel rank within the deployment. vLLM keeps it where it
            resets the data-parallel *rank* (dense models).
        data_parallel_size: data-parallel ranks of the deployment, as this worker knows them.
        world_size: tensor times pipeline parallel size.
        rank: position in that world.
        replica: index of the deployment, given by the trainer.
        num_replicas: one more than the highest number that the job has given a deployment.
        num_workers: workers of the deployment; 0 infers ``data_parallel_size * world_size``.
            A dense model's data-parallel ranks believe that they are alone, so there the trainer's
            client has to be given it.

    Raises:
        InitInfoError: the identity falls outside of its replica, or the replica outside of the job.

    >>> worker_identity(data_parallel_index=1, data_parallel_size=2, world_size=4, rank=3,
    ...                 replica=0, num_replicas=1)
    (ConsumerId(replica=0, worker=7), 8)
    """
    if num_replicas < 1 or not 0 <= replica < num_replicas:
        raise InitInfoError(
            f"replica {replica} of {num_replicas}: give every deployment its own number, from 0"
        )
    if num_workers < 0:
        raise InitInfoError(
            f"num_workers must not be negative, found {num_workers}: give the trainer's client the "
            "deployment's data-parallel size times its world size, or 0 to infer it"
        )
    worker = data_parallel_index * world_size + rank
    expected = num_workers or data_parallel_size * world_size
    if not 0 <= worker < expected:
        raise InitInfoError(
            f"worker {worker} (data-parallel index {data_parallel_index}, world size {world_size}, "
            f"rank {rank}) of a replica of {expected} workers: give num_workers, the deployment's "
            "data-parallel size times its world size, to the trainer's client"
        )
    return ConsumerId(replica, worker), expected
