"""Simulation: a Plan computed on floats that hold integers, and the reuse of values of earlier trials."""

from hago.simulation.simulator import Simulator

__all__ = [
    "Simulator",
]
