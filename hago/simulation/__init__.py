"""The Plan on float carriers, and the values that a later trial can reuse."""

from hago.simulation.simulator import Simulator

__all__ = [
    "Simulator",
]
