"""What `rdt_trainer` has to offer, all of it, which takes seconds to import (torch)."""

from rdt_trainer.client import Client
from rdt_trainer.engine import RdtTrainer
from rdt_trainer.errors import (
    ClientError,
    RankFailedError,
    RdtTrainerError,
    SettingsError,
    SourceError,
    SyncFailedError,
    TrainerStateError,
)
from rdt_trainer.held_parts import HeldPart, merged_metadata
from rdt_trainer.http_client import HttpClient
from rdt_trainer.local_client import LocalClient
from rdt_trainer.module_source import ModuleSource
from rdt_trainer.named_views import NamedView
from rdt_trainer.ray_client import RayClient
from rdt_trainer.report import SyncReport
from rdt_trainer.safetensors_source import SafetensorsSource
from rdt_trainer.sharded_source import ShardedModuleSource
from rdt_trainer.source import (
    LocalWeightSource,
    SourceMeta,
    StablePasses,
    StableTensors,
    WeightSource,
    adapt,
)
from rdt_transport.rendezvous import JobSettings, RendezvousAddress

__all__ = [
    "Client",
    "ClientError",
    "HeldPart",
    "HttpClient",
    "JobSettings",
    "LocalClient",
    "LocalWeightSource",
    "ModuleSource",
    "NamedView",
    "RankFailedError",
    "RayClient",
    "RdtTrainer",
    "RdtTrainerError",
    "RendezvousAddress",
    "SafetensorsSource",
    "SettingsError",
    "ShardedModuleSource",
    "SourceError",
    "SourceMeta",
    "StablePasses",
    "StableTensors",
    "SyncFailedError",
    "SyncReport",
    "TrainerStateError",
    "WeightSource",
    "adapt",
    "merged_metadata",
]
