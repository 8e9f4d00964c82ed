"""What two producers that publish different models are told."""

from rdt_plan import ProducerRecord, WireFormatError, decode_manifest
from rdt_plan.difference import first_difference
from rdt_transport.errors import DisagreementError, RendezvousProtocolError
from rdt_transport.rendezvous.packing import unpack

__all__ = ["manifests_differ"]


def manifests_differ(
    known: ProducerRecord, known_manifest: bytes, new: ProducerRecord, new_manifest: bytes
) -> DisagreementError:
    """The error for ``new``, which names the first difference of the two packed manifests."""
    who = f"producer {known.rank}", f"producer {new.rank}"
    difference = f"{who[0]} published manifest {known.manifest_digest}, {who[1]} manifest "
    difference += new.manifest_digest
    try:
        ours, theirs = (decode_manifest(unpack(each)) for each in (known_manifest, new_manifest))
        difference = first_difference(ours, theirs, who) or difference
    except (RendezvousProtocolError, WireFormatError):
        pass  # the digests differ, and that is all we can tell
    return DisagreementError(
        f"two trainers that disagree: {difference}; every rank must describe the same whole "
        "model: make metadata equal on all ranks, names in one order"
    )
