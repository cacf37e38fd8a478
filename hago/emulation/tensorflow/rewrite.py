"""TensorFlow's contrib.quantize: where its training and eval graphs have fake quantization.

A model is spelt as TensorFlow 1 spells it, in an `OpGraph`: names are scopes joined by `/`, an op has one output, known
by the op's name, and ops stand in the order in which they were made, which decides between overlapping matches.
`quantize_ops` first folds batch norms, then places the fake quantization of layers, then that of additions and
products of quantized tensors. No tensor is fake-quantized twice, so a second rewrite changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from hago.errors import GraphError, HagoError


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a TensorFlow graph: e.g. `Op("a/Conv2D", "Conv2D", ("x", "a/weights/read"))`."""

    name: str
    type: str
    inputs: tuple[str, ...] = ()


class OpGraph:
    """Ops by name, which rewrites add to and rewire; an op may read ops that stand after it.

    Raises:
        GraphError: two ops have one name, or an op reads one that is not there.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        self._ops: dict[str, Op] = {}
        for op in ops:
            if op.name in self._ops:
                raise GraphError(f"two ops are called {op.name!r}; names must be unique")
            self._ops[op.name] = op
        for op in self:
            for source in op.inputs:
                if source not in self._ops:
                    raise GraphError(f"op {op.name!r} reads {source!r}, which is not in the graph")

    def __iter__(self) -> Iterator[Op]:
        """The ops that are there now, in order."""
        return iter(tuple(self._ops.values()))

    def __getitem__(self, name: str) -> Op:
        return self._ops[name]

    def inputs(self, op: Op) -> tuple[Op, ...]:
        """The ops that `op` reads."""
        return tuple(self._ops[name] for name in op.inputs)

    def consumers(self, name: str) -> tuple[Op, ...]:
        """The ops that read `name`, in order."""
        return tuple(op for op in self if name in op.inputs)

    def unique(self, name: str) -> str:
        """`name`, with `_1`, `_2` and so on where ops stand in that scope already."""
        found, number = name, 0
        while any(op.name == found or op.name.startswith(f"{found}/") for op in self):
            number += 1
            found = f"{name}_{number}"
        return found

    def add(self, name: str, kind: str, *inputs: str) -> str:
        """A further op under a unique name, which is returned."""
        made = Op(self.unique(name), kind, inputs)
        self._ops[made.name] = made
        return made.name

    def reroute(self, old: str, new: str, readers: Iterable[str]) -> None:
        """Let `readers` read `new` where they read `old`."""
        for name in readers:
            op = self._ops[name]
            self._ops[name] = replace(op, inputs=tuple(new if s == old else s for s in op.inputs))


def scope_of(name: str) -> str:
    """The scope that an op stands in: all but the last part of its name."""
    return name.rpartition("/")[0]


def within(scope: str, name: str) -> str:
    """A name in a scope; the root scope is empty."""
    return f"{scope}/{name}" if scope else name


# ---------------------------------------------------------------- layers
#     weight          a variable that is read, or the Mul of a folded batch norm
#       |
#     layer           Conv2D, MatMul or DepthwiseConv2dNative, then BatchToSpaceND where it is dilated
#       |
#     bias            BiasAdd or an add; or, where a batch norm was folded, mul, add and add
#       |
#     bypass          an add that another tensor joins at
#       |
#     activation      Relu, Relu6 or Identity
#       |
#     post bypass     an add after the activation
# Each `_name` below matches the part of that name with all that stands above it. Inputs of a commutative op may come
# in either order; the first order that fits counts.

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


# ---------------------------------------------------------------- folding of batch norms
# The original layer stays, in training to give the statistics of the batch; readers of the norm read the folded layer.
# What scales and shifts is one op of type `BatchNormFold` here, instead of the few that compute it upstream.

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


# ---------------------------------------------------------------- fake quantization

Role = Literal["weight", "activation"]

#: The op that a fake quantization of this module is.
FAKE_QUANT: Final = "FakeQuantWithMinMaxVars"
_ARITHMETIC: Final = ADDS | {"Mul"}
_TRANSPARENT: Final = frozenset({"Reshape", "Identity", "BatchToSpaceND", "SpaceToBatchND", "MaxPool", "Max"})
_APPLIES: Final = ("Apply", "ResourceApply", "ResourceSparseApply", "SparseApply")


@dataclass(frozen=True, slots=True)
class FakeQuantOp:
    """One fake quantization that was put in.

    Args:
        name: its scope, e.g. "a/act_quant".
        producer: the op whose value is quantized.
        consumers: the ops that read the quantized value.
        role: `weight`: the range is the last value's, and narrow; `activation`: a moving average.
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    role: Role


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A graph with fake quantization.

    Args:
        ops: those that were there, then those that were made.
        fake_quants: in the order they were put in.
        stands_for: which op each weight, layer and output of a folded batch norm takes the place of.
    """

    ops: tuple[Op, ...]
    fake_quants: tuple[FakeQuantOp, ...]
    stands_for: Mapping[str, str]


def quantize_ops(ops: Iterable[Op], *, training: bool = True, scope: str | None = None) -> Rewritten:
    """The training graph or eval graph of a model.

        weights_quant                  after the weight, or after the product of a folded batch norm
        act_quant                      after the activation; after the bias where there is none
        conv_quant, add_quant          before and after a bypass; not after one that an activation follows
        post_activation_bypass_quant   after an add that follows an activation, unless a relu follows it
        activation_<type>_quant        after other adds and products of quantized tensors, likewise

    Args:
        ops: of the float model, with its loss or without; in the order they were made.
        training: batch norms are folded with the corrections of the training graph.
        scope: only what stands in this scope is quantized.

    Raises:
        HagoError: the graph holds training ops.
        GraphError: names are not unique, or an op reads what is not there.

    References:
        tensorflow/contrib/quantize/python/{quantize_graph,quantize,fold_batch_norms}.py (r1.15).
    """
    graph = OpGraph(ops)
    trained = [op.name for op in graph if op.type.startswith(_APPLIES)]
    if trained:
        raise HagoError(f"training op found in the graph: {trained[0]}; rewrite it before gradients are added")
    stands_for = fold_batch_norms(graph, training=training)
    inserter = _Inserter(graph, scope)
    for match in find_layers(graph):
        inserter.layer(match)
    inserter.arithmetic()
    return Rewritten(tuple(graph), tuple(inserter.made), stands_for)


class _Inserter:
    """Puts fake quantizations in, and remembers which ops have one."""

    def __init__(self, graph: OpGraph, scope: str | None) -> None:
        self.graph = graph
        self.scope = "" if not scope else scope.rstrip("/") + "/"
        self.made: list[FakeQuantOp] = []
        self.quantized: set[str] = set()

    def layer(self, match: Match) -> None:
        """The fake quantizations of one layer."""
        context = scope_of(match.layer)
        outer = scope_of(context) if match.bypass else context
        if match.weight is not None:
            self._insert(within(context, "weights_quant"), match.weight, "weight", producer=False)
        if match.activation is not None:
            self._insert(within(outer, "act_quant"), match.activation, consumers=False)
            self.quantized.add(match.activation)
        if match.bypass is not None and match.bias is not None:
            self._insert(within(context, "conv_quant"), match.bias)
            self.quantized.add(match.bias)
            if not self._read_by(match.bypass, ACTIVATIONS):
                self._insert(within(outer, "add_quant"), match.bypass)
                self.quantized.add(match.bypass)
        if match.post_bypass is not None and not self._read_by(match.post_bypass, RELUS):
            name = within(scope_of(match.post_bypass), "post_activation_bypass_quant")
            self._insert(name, match.post_bypass, consumers=False)
            self.quantized.add(match.post_bypass)

    def arithmetic(self) -> None:
        """The fake quantizations of adds and products of quantized tensors."""
        for op in self.graph:
            if self._takes_quantized(op):
                self._insert(f"{op.name}/activation_{op.type}_quant", op.name, consumers=False)

    def _read_by(self, name: str, kinds: frozenset[str]) -> bool:
        return any(op.type in kinds for op in self._readers(name))

    def _readers(self, name: str) -> tuple[Op, ...]:
        """Who reads a tensor, past the fake quantization it may have."""
        found: list[Op] = []
        for op in self.graph.consumers(name):
            found += self.graph.consumers(op.name) if op.type == FAKE_QUANT else [op]
        return tuple(found)

    def _takes_quantized(self, op: Op) -> bool:
        op = self.graph[op.name]
        if op.type not in _ARITHMETIC or op.name in self.quantized:
            return False
        readers = self.graph.consumers(op.name)
        if len(readers) == 1 and readers[0].type in RELUS:
            return False
        for source in self.graph.inputs(op):
            while source.type in _TRANSPARENT and source.inputs:
                source = self.graph.inputs(source)[0]
            if source.type == FAKE_QUANT:
                return True
            if source.type in _ARITHMETIC and any(self._takes_quantized(o) for o in self.graph.inputs(source)):
                return True
        return False

    def _insert(
        self, name: str, source: str, role: Role = "activation", *, producer: bool = True, consumers: bool = True
    ) -> None:
        """Fake-quantize a tensor, unless it is.

        Args:
            producer, consumers: which of them must stand in the scope.
        """
        readers = [op.name for op in self.graph.consumers(source)]
        outside = [source] * producer + readers * consumers
        if not all(n.startswith(self.scope) for n in outside) or self._is_followed(source):
            return
        name = self.graph.unique(name)
        made = self.graph.add(f"{name}/{FAKE_QUANT}", FAKE_QUANT, source)
        self.graph.reroute(source, made, readers)
        self.made.append(FakeQuantOp(name, source, tuple(readers), role))

    def _is_followed(self, source: str) -> bool:
        """Whether a tensor is fake-quantized, past reshapes and identities."""
        pending: Sequence[Op] = self.graph.consumers(source)
        while pending:
            if any(op.type in FAKE_QUANTS for op in pending):
                return True
            pending = [c for op in pending if op.type in ("Reshape", "Identity") for c in self.graph.consumers(op.name)]
        return False
