"""Pure planning of weight syncs: what each inference worker reads, from whom, and in what order.

Standard library only; no clock, socket, thread or tensor. `build_plan` turns a `Manifest` and the
recorded writes of one consumer into a `SyncPlan`; `ConsumerEpoch` and `ProducerEpoch` follow it.

Three modules are imported by name: `rdt_plan.program` (the parts of one), `rdt_plan.simulate` and,
as it needs hypothesis, `rdt_plan.testing`.
"""

from rdt_plan.chunks import Chunk, ServeChunk
from rdt_plan.cutting import cut
from rdt_plan.digest import canonical_json, digest_of
from rdt_plan.direct import DirectRule

# one epoch, sans IO
from rdt_plan.doorbell import Doorbell, Kind
from rdt_plan.dtypes import ITEM_BYTES, item_bytes
from rdt_plan.errors import (
    LayoutError,
    ManifestError,
    OwnershipError,
    PeerProtocolError,
    PlanError,
    ProtocolError,
    RdtPlanError,
    RoutingError,
    SliceError,
    WireFormatError,
)
from rdt_plan.groups import (
    GatherGroup,
    gather_groups,
    group_key,
    group_ordered,
    group_schedule,
    rank_schedule,
)
from rdt_plan.identity import ConsumerId
from rdt_plan.layout import ALIGNMENT, PackLayout, align, pack_layout
from rdt_plan.mailbox import DropReason, Mailbox, Verdict
from rdt_plan.manifest import Manifest, ParamMeta
from rdt_plan.mesh import AxisPlacement, Box
from rdt_plan.ownership import Ownership
from rdt_plan.placement import Fill, Placement, Write, check_write
from rdt_plan.plan import SyncPlan, build_plan
from rdt_plan.program import Program
from rdt_plan.program_rules import check_program

# what crosses the rendezvous
from rdt_plan.records import (
    EpochRecord,
    JobRecord,
    Offer,
    ProducerRecord,
    SlotRegion,
    SourceRegion,
    Subscription,
)
from rdt_plan.routing import Router
from rdt_plan.session import (
    ConsumerAction,
    ConsumerEpoch,
    EpochState,
    Finished,
    Pack,
    PostRead,
    ProducerAction,
    ProducerEpoch,
    Quiesced,
    Ready,
    Release,
    Scatter,
)
from rdt_plan.sharing import check_sharing
from rdt_plan.slices import Slice, canonical, check_bounds, contiguous_stride, whole
from rdt_plan.slots import SlotRing, SlotState
from rdt_plan.staging import is_staging, staging_name
from rdt_plan.table import ChunkTable, check_table
from rdt_plan.wire import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    decode_manifest,
    decode_message,
    decode_plan,
    decode_table,
    encode_manifest,
    encode_message,
    encode_plan,
    encode_table,
)

__all__ = [
    "ALIGNMENT",
    "ITEM_BYTES",
    "MAX_MESSAGE_BYTES",
    "WIRE_VERSION",
    "AxisPlacement",
    "Box",
    "Chunk",
    "ChunkTable",
    "ConsumerAction",
    "ConsumerEpoch",
    "ConsumerId",
    "DirectRule",
    "Doorbell",
    "DropReason",
    "EpochRecord",
    "EpochState",
    "Fill",
    "Finished",
    "GatherGroup",
    "JobRecord",
    "Kind",
    "LayoutError",
    "Mailbox",
    "Manifest",
    "ManifestError",
    "Offer",
    "Ownership",
    "OwnershipError",
    "Pack",
    "PackLayout",
    "ParamMeta",
    "PeerProtocolError",
    "Placement",
    "PlanError",
    "PostRead",
    "ProducerAction",
    "ProducerEpoch",
    "ProducerRecord",
    "Program",
    "ProtocolError",
    "Quiesced",
    "RdtPlanError",
    "Ready",
    "Release",
    "Router",
    "RoutingError",
    "Scatter",
    "ServeChunk",
    "Slice",
    "SliceError",
    "SlotRegion",
    "SlotRing",
    "SlotState",
    "SourceRegion",
    "Subscription",
    "SyncPlan",
    "Verdict",
    "WireFormatError",
    "Write",
    "align",
    "build_plan",
    "canonical",
    "canonical_json",
    "check_bounds",
    "check_program",
    "check_sharing",
    "check_table",
    "check_write",
    "contiguous_stride",
    "cut",
    "decode_manifest",
    "decode_message",
    "decode_plan",
    "decode_table",
    "digest_of",
    "encode_manifest",
    "encode_message",
    "encode_plan",
    "encode_table",
    "gather_groups",
    "group_key",
    "group_ordered",
    "group_schedule",
    "is_staging",
    "item_bytes",
    "pack_layout",
    "rank_schedule",
    "staging_name",
    "whole",
]
