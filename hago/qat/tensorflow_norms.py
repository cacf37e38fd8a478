"""Batch norms of a TensorFlow graph folded into the layers before them, as contrib.quantize does.

The layer that was there stays, in training to give the statistics of the batch; what read the norm
reads the folded layer. What scales and shifts is one op of type `BatchNormFold` each here, in the
place of the few that compute it upstream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hago.qat.tensorflow_match import ADDS, BATCH_NORMS, LAYERS
from hago.qat.tensorflow_ops import Op, OpGraph, scope_of, within

_COMPUTED: Final = "BatchNormFold"


@dataclass(frozen=True, slots=True)
class _Norm:
    """A layer and its batch norm.

    Args:
        layer: that is folded into.
        to_space: the BatchToSpaceND of a dilated layer.
        output: the op whose readers are to read the folded layer.
        parameters: the ops that the statistics and the affine part come from.
    """

    layer: Op
    to_space: Op | None
    output: str
    parameters: tuple[str, ...]


def fold_batch_norms(graph: OpGraph, *, training: bool) -> dict[str, str]:
    """Fold every batch norm that follows a layer: fused ones first, then those made of several ops.

    Returns:
        Which op each folded weight, layer and output stands for.
    """
    stands_for: dict[str, str] = {}
    for find in (_fused, _unfused):
        done: set[str] = set()
        for norm in [n for op in graph if (n := find(graph, op)) is not None]:
            if norm.layer.name not in done and graph.consumers(norm.output):
                done.add(norm.layer.name)
                stands_for |= _fold(graph, norm, training)
    return stands_for


def _source(graph: OpGraph, op: Op, index: int = 0) -> Op:
    return graph[op.inputs[index]]


def _layer_before(graph: OpGraph, op: Op) -> tuple[Op, Op | None] | None:
    """The layer whose output `op` is, and its BatchToSpaceND."""
    if op.type == "Identity" and len(op.inputs) == 1:
        op = _source(graph, op)
    to_space = None
    if op.type == "BatchToSpaceND" and len(op.inputs) == 3:
        to_space, op = op, _source(graph, op)
    return (op, to_space) if op.type in LAYERS and len(op.inputs) == 2 else None


def _fused(graph: OpGraph, op: Op) -> _Norm | None:
    """A fused batch norm: (x, gamma, beta, mean, variance); one of a MatMul stands between two reshapes."""
    if op.type not in BATCH_NORMS or len(op.inputs) != 5:
        return None
    source = _source(graph, op)
    if source.type == "Reshape" and len(source.inputs) == 2:
        source = _source(graph, source)
    found = _layer_before(graph, source)
    if found is None:
        return None
    output = op.name
    if found[0].type == "MatMul":
        reshapes = [r for r in graph.consumers(op.name) if r.type == "Reshape" and r.inputs[0] == op.name]
        if not reshapes:
            return None
        output = reshapes[0].name
    return _Norm(*found, output, op.inputs[1:])


def _unfused(graph: OpGraph, op: Op) -> _Norm | None:
    """`x * s + (beta - mean * s)`, written out."""
    if op.type not in ADDS or len(op.inputs) != 2:
        return None
    scaled, shift = sorted(graph.inputs(op), key=lambda o: o.type)
    if (scaled.type, shift.type) != ("Mul", "Sub") or len(shift.inputs) != 2 or len(scaled.inputs) != 2:
        return None
    centre = _source(graph, shift, 1)
    if centre.type != "Mul" or scaled.inputs[1] not in centre.inputs:
        return None
    found = _layer_before(graph, _source(graph, scaled))
    return None if found is None else _Norm(*found, op.name, (scaled.inputs[1], shift.name))


def _fold(graph: OpGraph, norm: _Norm, training: bool) -> dict[str, str]:
    layer, scope = graph[norm.layer.name], scope_of(norm.layer.name)  # as earlier folds left it
    readers = [op.name for op in graph.consumers(norm.output)]

    def computed(name: str) -> str:
        return graph.add(within(scope, f"BatchNorm_Fold/{name}"), _COMPUTED, *norm.parameters)

    weight = layer.inputs[1]
    if training:
        weight = graph.add(within(scope, "correction_mult"), "Mul", computed("correction_scale"), weight)
    weight = graph.add(within(scope, "mul_fold"), "Mul", weight, computed("scale"))
    folded = output = graph.add(f"{layer.name}_Fold", layer.type, layer.inputs[0], weight)
    if norm.to_space is not None:
        to_space = norm.to_space
        output = graph.add(f"{to_space.name}_Fold", to_space.type, output, *to_space.inputs[1:])
    if training:
        output = graph.add(within(scope, "post_conv_mul"), "Mul", computed("correction_recip"), output)
        output = graph.add(within(scope, "correction_add"), "AddV2", output, computed("correction_offset"))
    output = graph.add(within(scope, "add_fold"), "AddV2", output, computed("bias"))
    graph.reroute(norm.output, output, readers)
    return {weight: layer.inputs[1], folded: layer.name, output: norm.output}
