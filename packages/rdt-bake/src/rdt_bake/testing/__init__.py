"""What tests of recordings need, here and in packages that build on this one."""

from rdt_bake.testing.comparison import check_recording, differing_places, random_weights
from rdt_bake.testing.toy_model import TOY_WEIGHTS, ToyModel, each_weight, refusal

__all__ = [
    "TOY_WEIGHTS",
    "ToyModel",
    "check_recording",
    "differing_places",
    "each_weight",
    "random_weights",
    "refusal",
]
