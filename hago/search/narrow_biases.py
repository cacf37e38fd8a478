"""Biases whose slot is narrower than the accumulator: a warning where they cost weights their precision."""

from __future__ import annotations

from hago.errors import warn
from hago.plan import NodePlan, Plan
from hago.serialization.summary import names_text

#: A weight has lost its precision where its largest integer is below this share of what its bits hold.
_LEFT = 0.25


def warn_of_narrow_biases(plan: Plan) -> None:
    """Warn where weights have much coarser scales than their thresholds give, so that biases fit their narrow slots."""
    coarse = [name for name, node in plan.nodes.items() if _lost_precision(node)]
    if coarse:
        slots = {str(plan.nodes[name].desc.bias_dtype(2)) for name in coarse}
        warn(
            f"the weights of {names_text(coarse)} have lost most of their bits to their biases, which must fit "
            f"{' and '.join(sorted(slots))} in units of the products' scale: give the data and weights of each fewer "
            f"bits (fix_bits={{'{coarse[0]}:*': 4}}), or list a wider bias in the hardware file"
        )


def _lost_precision(node: NodePlan) -> bool:
    if not node.raised or node.desc.bias_dtype(2).bits >= node.desc.register.dtype.bits:
        return False
    weight, integers = node.operands[1], node.consts.get(1)
    assert weight is not None and integers is not None
    rows = integers.abs().flatten(1).amax(1) if weight.scale.numel() > 1 else integers.abs().amax().reshape(1)
    lost = sum(float(rows[channel]) < _LEFT * weight.qmax for channel in node.raised)
    return 2 * lost > len(rows)
