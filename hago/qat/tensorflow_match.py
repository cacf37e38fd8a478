"""Which ops of a TensorFlow graph make up a layer that contrib.quantize quantizes.

      weight          a variable that is read, or the Mul of a folded batch norm
        |
      layer           Conv2D, MatMul or DepthwiseConv2dNative, then BatchToSpaceND where it is dilated
        |
      bias            BiasAdd or an add; or, where a batch norm was folded, mul, add and add
        |
      bypass          an add that another tensor joins at
        |
      activation      Relu, Relu6 or Identity
        |
      post bypass     an add after the activation

Each `_name` below matches the part of that name with all that stands above it. Inputs of a
commutative op may come in either order; the first order that fits counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from hago.qat.tensorflow_ops import Op, OpGraph

LAYERS: Final = frozenset({"Conv2D", "MatMul", "DepthwiseConv2dNative"})
ADDS: Final = frozenset({"Add", "AddV2"})
RELUS: Final = frozenset({"Relu", "Relu6"})
ACTIVATIONS: Final = RELUS | {"Identity"}
BATCH_NORMS: Final = frozenset({"FusedBatchNorm", "FusedBatchNormV3"})
FAKE_QUANTS: Final = frozenset(
    {"FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVarsPerChannel"}
)
_VARIABLES: Final = frozenset({"Variable", "VariableV2"})


@dataclass(frozen=True, slots=True)
class Match:
    """The names of a layer's ops; None for a part that it has not."""

    layer: str
    weight: str | None
    bias: str | None = None
    bypass: str | None = None
    activation: str | None = None
    post_bypass: str | None = None


_Pattern = Callable[[OpGraph, Op], Match | None]


def find_layers(graph: OpGraph) -> list[Match]:
    """Every layer to quantize, once each: the largest match wins, then the first.

    Order of search: layers with a bypass after the activation, those that end at an activation,
    those that end at their bias, and those that another layer reads directly.
    """
    found: dict[str, Match] = {}
    for pattern in (_post_bypass, _ends_at_activation, _ends_at_bias, _feeds_a_layer):
        for op in graph:
            match = pattern(graph, op)
            if match is not None and match.layer not in found:
                found[match.layer] = match
    return list(found.values())


# ---------------------------------------------------------------- from the weight down
def is_weight(graph: OpGraph, op: Op) -> bool:
    """Whether an op gives a layer its weight, so that it can be fake-quantized."""
    return op.type in ("Mul", "ReadVariableOp") or _is_read(graph, op)


def _is_read(graph: OpGraph, op: Op) -> bool:
    """An Identity of a variable: of it, of the read of one, or of the concatenation of its partitions."""
    if op.type != "Identity" or len(op.inputs) != 1:
        return False
    (source,) = graph.inputs(op)
    if source.type == "ConcatV2" and len(source.inputs) == 3:
        source = graph.inputs(source)[0]
        return source.type == "Identity" and len(source.inputs) == 1 and graph.inputs(source)[0].type in _VARIABLES
    if source.type == "Identity" and len(source.inputs) == 1:
        (source,) = graph.inputs(source)
    return source.type in _VARIABLES


def _layer(graph: OpGraph, op: Op) -> Match | None:
    if op.type not in LAYERS or len(op.inputs) != 2 or _has_quantized_weight(graph, op):
        return None
    for source in reversed(graph.inputs(op)):
        if is_weight(graph, source):
            return Match(op.name, source.name)
    return None


def _has_quantized_weight(graph: OpGraph, op: Op) -> bool:
    """Whether a layer was quantized before; upstream takes a product that it reads for its weight then."""
    weight = graph.inputs(op)[1]
    return weight.type in FAKE_QUANTS and is_weight(graph, graph.inputs(weight)[0])


def _layer_output(graph: OpGraph, op: Op) -> Match | None:
    if op.type == "BatchToSpaceND" and len(op.inputs) == 3:
        return _layer(graph, graph.inputs(op)[0])
    return _layer(graph, op)


def _either(graph: OpGraph, op: Op, pattern: _Pattern) -> Match | None:
    """The match of the first input of a binary op that has one."""
    if len(op.inputs) != 2:
        return None
    first, second = graph.inputs(op)
    return pattern(graph, first) or pattern(graph, second)


def _plain_bias(graph: OpGraph, op: Op) -> Match | None:
    found = _either(graph, op, _layer_output) if op.type in ADDS | {"BiasAdd"} else None
    return found and replace(found, bias=op.name)


def _corrected(graph: OpGraph, op: Op) -> Match | None:
    """The folded layer times what corrects it to the batch's sigma, plus the offset of a frozen norm."""

    def scaled(graph: OpGraph, op: Op) -> Match | None:
        return _either(graph, op, _layer_output) if op.type == "Mul" else None

    return _either(graph, op, scaled) if op.type in ADDS else None


def _folded_bias(graph: OpGraph, op: Op) -> Match | None:
    found = _either(graph, op, _corrected) if op.type in ADDS else None
    return found and replace(found, bias=op.name)


def _bias(graph: OpGraph, op: Op) -> Match | None:
    return _plain_bias(graph, op) or _folded_bias(graph, op)


def _forced_norm(graph: OpGraph, op: Op) -> Match | None:
    """A folded batch norm whose updates are forced ends in an Identity."""
    return _folded_bias(graph, graph.inputs(op)[0]) if op.type == "Identity" and len(op.inputs) == 1 else None


def _bypass(graph: OpGraph, op: Op) -> Match | None:
    def joined(graph: OpGraph, op: Op) -> Match | None:
        return _bias(graph, op) or _forced_norm(graph, op)

    found = _either(graph, op, joined) if op.type in ADDS else None
    return found and replace(found, bypass=op.name)


def _activation(graph: OpGraph, op: Op) -> Match | None:
    if op.type not in ACTIVATIONS or len(op.inputs) != 1:
        return None
    (source,) = graph.inputs(op)
    for pattern in (_bias, _forced_norm, _bypass, _layer):
        found = pattern(graph, source)
        if found is not None:
            return replace(found, activation=op.name)
    return None


# ---------------------------------------------------------------- what a layer ends at
def _post_bypass(graph: OpGraph, op: Op) -> Match | None:
    if op.type not in ADDS or len(op.inputs) != 2:
        return None
    first, second = graph.inputs(op)
    found = _activation(graph, second) or _activation(graph, first)
    return found and replace(found, post_bypass=op.name)


def _ends_at_activation(graph: OpGraph, op: Op) -> Match | None:
    """An Identity that a batch norm alone reads belongs to the statistics of a norm that was folded."""
    found = _activation(graph, op)
    readers = graph.consumers(op.name)
    if op.type == "Identity" and len(readers) == 1 and readers[0].type in BATCH_NORMS:
        return None
    return found


def _ends_at_bias(graph: OpGraph, op: Op) -> Match | None:
    found = _bias(graph, op)
    return found and Match(found.layer, found.weight, activation=op.name)


def _feeds_a_layer(graph: OpGraph, op: Op) -> Match | None:
    """The first half of a separable convolution; contrib.quantize leaves its weight, if folded, float."""
    found = _either(graph, op, _layer_output) if op.type in LAYERS else None
    if found is None or found.weight is None:
        return None
    weight = None if graph[found.weight].type == "Mul" else found.weight
    return Match(found.layer, weight, activation=found.layer)
