"""What an inspection found of one node: frozen values, in real units and dB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hago.debug.causes import Cause
from hago.numerics import Overflow
from hago.plan import Verdict

EdgeKind = Literal["data", "constant", "output"]


@dataclass(frozen=True, slots=True)
class ValueStatistic:
    """Finite values of one node in one of the three executions; None where there were none."""

    minimum: float | None
    maximum: float | None
    mean: float | None
    deviation: float | None


@dataclass(frozen=True, slots=True)
class CauseStatistic:
    """What one cause contributes to the error of a node.

    Args:
        power: mean square of what the cause added.
        largest: the largest magnitude of what it added.
        share: sum(added * error) / sum(error^2), the part of the error that lies along what the
            cause added. Shares of all causes sum to 1; a cause that undoes others has a negative
            one. None where there is no error.
        own_share: the same within what the node itself added; None for what was inherited, and
            where the node added nothing.
    """

    power: float
    largest: float
    share: float | None
    own_share: float | None


@dataclass(frozen=True, slots=True)
class EdgeStatistic:
    """One in-edge of an integer node, or its requantized output (`node:out`).

    Args:
        edge: its key.
        source: the node whose value travels on it.
        kind: what travels: data, a constant, or the node's own output.
        bits: that the range of its integers needs.
        dtype: of the slot.
        scale: real units per quantum, the largest where it varies per channel.
        per_channel: whether it varies.
        requantized: whether values change on the edge, or pass as the producer emits them.
        saturated, values: how many were clipped, of how many.
        rounding_sqnr: dB of the value before the edge over what rounding changed.
        saturation_sqnr: dB of the same over what clipping changed.
        rounding_effect: the mean square that rounding on this edge puts into the node's value. Known
            where the edge is in the node's own units (a bias, operands of an add, the output), else
            estimated as the edge's noise-to-signal ratio times the power of the node's value.
        saturation_effect: the same of clipping.
        channels: of a weight, its output channels.
        narrow_channels: how many of them reach fewer than `hago.debug.summary.NARROW` quanta.
    """

    edge: str
    source: str
    kind: EdgeKind
    bits: int
    dtype: str
    scale: float
    per_channel: bool
    requantized: bool
    saturated: int = 0
    values: int = 0
    rounding_sqnr: float | None = None
    saturation_sqnr: float | None = None
    rounding_effect: float = 0.0
    saturation_effect: float = 0.0
    channels: int = 0
    narrow_channels: int = 0

    @property
    def saturated_fraction(self) -> float:
        """The part of the values that was clipped."""
        return self.saturated / self.values if self.values else 0.0

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self) | {"saturated_fraction": self.saturated_fraction}


@dataclass(frozen=True, slots=True)
class NodeStatistic:
    """One node over all batches.

    Args:
        inputs: the nodes whose values it reads, constants aside.
        integer: whether it runs in integers.
        count: values that went into the error figures.
        float_values, simulated_values, integer_values: in real units.
        sqnr: dB of the float value over the simulated error; None where there are no figures.
        inherited_sqnr: the same, had the node itself been exact on its simulated inputs.
        own_sqnr: dB of the float value over what the node itself added.
        cosine: between float and simulated value; None where either is 0 everywhere.
        max_error: the largest |simulated - float|.
        error_power: mean square of simulated - float.
        causes: what each cause contributes; see `hago.debug.causes`.
        differences: values that differ between the simulator and the integer model: integers are
            compared as integers, floats by their bits.
        max_difference: by how much: quanta of an integer node, real units of a float node.
        edges: in-edges of an integer node, and its output where it requantizes.
        verdict: on overflow: proved absent, possible, seen, or float.
        register, on_overflow: the accumulator's dtype, and what it does past its range.
        bound: the largest accumulator that any input can cause, over the register's maximum.
        overflows, accumulators: how many accumulators left their register, of how many.
        left_out: values that were infinite or NaN.
        raised: channels of the weight whose scale was raised so that their biases fit the accumulator.
        past: the node (relu, clamp, pooling) behind which errors are taken, where the requantized
            output covers only what that lets through.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    integer: bool
    count: int
    float_values: ValueStatistic
    simulated_values: ValueStatistic
    integer_values: ValueStatistic
    sqnr: float | None
    inherited_sqnr: float | None
    own_sqnr: float | None
    cosine: float | None
    max_error: float | None
    error_power: float | None
    causes: Mapping[Cause, CauseStatistic]
    differences: int
    max_difference: float
    edges: tuple[EdgeStatistic, ...] = ()
    verdict: Verdict = "float"
    register: str | None = None
    on_overflow: Overflow | None = None
    bound: float | None = None
    overflows: int = 0
    accumulators: int = 0
    left_out: int = 0
    raised: int = 0
    past: str | None = None

    @property
    def inherited_share(self) -> float:
        """The part of the error that was inherited, held within [0, 1]; 0 where there is no error."""
        return min(1.0, max(0.0, self.causes["inherited"].share or 0.0))

    @property
    def main_cause(self) -> Cause | None:
        """The cause with the largest part in what the node itself added; None where it added nothing."""
        own = [(s.own_share, cause) for cause, s in self.causes.items() if s.own_share is not None]
        return max(own)[1] if own else None

    @property
    def saturated_fraction(self) -> float:
        """The largest part of values clipped on any of its edges that carry data."""
        return max((e.saturated_fraction for e in self.edges if e.kind != "constant"), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        found = asdict(self)
        found["inputs"] = list(self.inputs)
        found["causes"] = {cause: asdict(s) for cause, s in self.causes.items()}
        found["edges"] = [e.to_json() for e in self.edges]
        return found | {"main_cause": self.main_cause}
