"""Stand-ins for what a trainer talks to, for its own tests and its users'."""

from rdt_trainer.testing.piece_source import PieceSource
from rdt_trainer.testing.torch_engine import TorchEngineClient

__all__ = ["PieceSource", "TorchEngineClient"]
