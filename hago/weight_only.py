"""Weight only: the weight of a node that computes in float, as integers at its bits.

Nothing of it can overflow, and nothing is requantized: `float32(c) * float32(scale)` is what the node reads, in the
simulator, the integer model and an ONNX file alike.
"""

from __future__ import annotations

from hago.errors import InfeasibleBits
from hago.graph import Node
from hago.operands import Operands, Owner
from hago.plan import StoredWeight
from hago.topology import weight_only_descs
from hago.types import Edge


def stored_weight(owner: Owner, node: Node, edge: Edge, bits: int) -> StoredWeight:
    """A weight at its bits, in the first signature that holds them; of those that differ in the sign only, the
    first that holds its values.

    Args:
        edge: on which the node reads it.

    Raises:
        InfeasibleBits: no signature holds the bits.
    """
    descs = weight_only_descs(owner.graph, node, owner.hardware, owner.ops)
    holding = [d for d in descs if bits <= d.in_dtype(edge.slot).bits]
    if not holding:
        raise InfeasibleBits(
            f"no signature of {owner.hardware.name} holds {bits} bits for edge {str(edge)!r}; it has "
            f"{'; '.join(map(str, descs))}",
            node.name,
        )
    form, source = owner.ops[node.op].integer, node.inputs[edge.slot]
    assert form is not None
    twins = [d for d in holding if d.widths == holding[0].widths]
    signed = owner.thresholds.signed(str(edge), source)
    desc = next((d for d in twins if d.in_dtype(edge.slot).signed or not signed), holding[0])
    real = [None] * len(node.inputs)
    operands = Operands(owner, node, form, real, real)
    qparams = operands.quantized(edge.slot, bits, desc.in_dtype(edge.slot))
    return StoredWeight(desc, qparams, owner.const(source, qparams), operands.thresholds[str(edge)])
