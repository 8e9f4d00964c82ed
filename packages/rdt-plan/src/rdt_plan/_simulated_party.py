"""What a simulated producer and a simulated consumer have in common."""

from rdt_plan._simulated_rendezvous import SimulatedRendezvous
from rdt_plan._simulated_world import RENDEZVOUS, Step, World

__all__ = ["SimulatedParty"]


class SimulatedParty:
    """A name, a connection to the rendezvous, and the number of the last epoch it has entered."""

    def __init__(self, world: World, rendezvous: SimulatedRendezvous, name: str) -> None:
        self.world = world
        self.name = name
        self.number = 0
        self._rendezvous = rendezvous

    def _tell(self, what: Step) -> None:
        self.world.tell(self.name, RENDEZVOUS, what)

    def _tell_failure(self, reason: str) -> None:
        """Give the epoch up for everybody."""
        number = self.number
        self._tell(lambda: self._rendezvous.fail(number, f"{self.name}: {reason}"))

    def _violate(self, what: str) -> None:
        self.world.violations.append(f"{self.name}, epoch {self.number}: {what}")
