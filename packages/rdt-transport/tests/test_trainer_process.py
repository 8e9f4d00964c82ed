"""Sessions between two processes, over the nixl wire: slotted, direct, and both."""

import pytest

from rdt_transport.rendezvous import JobSettings
from rdt_transport.testing.sample_job import draw, expect_shard, model, shards, sink_of
from rdt_transport.testing.trainer_process import TrainerProcess, worker_of

SECONDS = 60.0
SETTINGS = JobSettings(1, max_chunk_bytes=96)


@pytest.mark.parametrize("stable", [None, (), ("embed", "layers.1.w", "head")])
def test_every_epoch_is_exact_although_the_trainer_goes_on_at_once(stable):
    manifest = model()
    sink = sink_of(shards(manifest, 0, 1))
    with (
        TrainerProcess(manifest, SETTINGS, "cpu", stable) as trainer,
        worker_of(trainer, manifest, SETTINGS, sink) as (consumer, client),
    ):
        assert (consumer.plan.direct_bytes > 0) == (stable != ())
        assert (consumer.plan.staged_bytes > 0) == (stable is not None)
        for epoch in (1, 2):
            trainer.tell("sync", epoch, epoch)
            consumer.start(client.epoch_record(SECONDS, epoch))
            consumer.wait(SECONDS)
            consumer.commit(SECONDS)
            trainer.answer()
            expect_shard(sink, draw(manifest, epoch), 0, 1)
    sink.close()
