"""Simulation: a Plan computed on floats that hold integers, and the reuse of values of earlier trials."""

from hago.simulation.differentiable import DifferentiableNodes, Drop
from hago.simulation.overflow import AccumulatorExtremes, AccumulatorWatch
from hago.simulation.simulator import Carriers, Simulator, carrier_to_real
from hago.simulation.value_cache import Reuse, ValueCache

__all__ = [
    "AccumulatorExtremes",
    "AccumulatorWatch",
    "Carriers",
    "DifferentiableNodes",
    "Drop",
    "Reuse",
    "Simulator",
    "ValueCache",
    "carrier_to_real",
]
