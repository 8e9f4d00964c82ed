"""What tests of recordings need, here and in packages that build on this one."""

from rdt_bake.testing.comparison import check_recording, differing_places, random_weights

__all__ = ["check_recording", "differing_places", "random_weights"]
