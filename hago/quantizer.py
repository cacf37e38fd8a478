"""Quantizer: a strategy applied to a model, simulated or realized."""

from __future__ import annotations

from dataclasses import dataclass

from hago.plan import Plan
from hago.realization import IntegerModel
from hago.simulator import Simulator
from hago.stored import Provenance
from hago.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Quantizer:
    """A Plan with the strategy it came from; `simulate()` and `quantize()` give the two models.

    Both are nn.Modules that take and return real values as the float model does; their outputs
    are equal bit for bit.
    """

    plan: Plan
    strategy: Strategy

    def simulate(self) -> Simulator:
        """The simulated model: integers carried in floats, as fast as the float model or nearly."""
        return Simulator(self.plan)

    def quantize(self) -> IntegerModel:
        """The integer model: weights and activations stored as integers."""
        return IntegerModel(self.plan, Provenance.of(self.strategy))
