"""TensorFlow's contrib.quantize: the graph rewrite that inserts fake quantization.

`quantize_ops` is the entry point. `hago.plan.placement` calls it to find where TensorFlow would quantize a model; users
call it to compare graphs. It first folds batch norms, then inserts the fake quantization of layers, then that of sums
and products of quantized tensors. No tensor is fake-quantized twice, so a second rewrite changes nothing.

The graph is that of TensorFlow 1, held in an `OpGraph`. The name of an op is its scopes joined by `/`. An op has one
output, which has the op's name. Ops are kept in the order of their creation, which decides between overlapping matches.
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
    """The ops of a graph by name, in order of creation; rewrites add ops and reroute inputs.

    An op may read ops that were created after it.

    Raises:
        GraphError: two ops have one name, or an op reads one that is not in the graph.
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
        """Iterate over the present ops in order; ops that are added meanwhile are not visited."""
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
        """`name`, or the first of `name_1`, `name_2` and so on that is neither an op nor a scope of one."""
        candidate, number = name, 0
        while any(op.name == candidate or op.name.startswith(f"{candidate}/") for op in self):
            number += 1
            candidate = f"{name}_{number}"
        return candidate

    def add(self, name: str, kind: str, *inputs: str) -> str:
        """Append an op under a unique name, and return that name."""
        op = Op(self.unique(name), kind, inputs)
        self._ops[op.name] = op
        return op.name

    def reroute(self, old: str, new: str, readers: Iterable[str]) -> None:
        """Replace the input `old` of the ops `readers` by `new`."""
        for name in readers:
            op = self._ops[name]
            self._ops[name] = replace(op, inputs=tuple(new if s == old else s for s in op.inputs))


def scope_of(name: str) -> str:
    """The scope of an op: all but the last part of its name."""
    return name.rpartition("/")[0]


def within(scope: str, name: str) -> str:
    """Join a scope and a name; the root scope is the empty string."""
    return f"{scope}/{name}" if scope else name


# ---------------------------------------------------------------- layers
# The parts that contrib.quantize recognizes, each of which reads the one above it:
#
#     weight          a variable that is read, or the Mul of a folded batch norm
#       |
#     layer           Conv2D, MatMul or DepthwiseConv2dNative; if dilated, followed by BatchToSpaceND
#       |
#     bias            BiasAdd or an add; after the folding of a batch norm also a mul and two adds
#       |
#     bypass          an add of the layer's output and another tensor, such as a residual connection
#       |
#     activation      Relu, Relu6 or Identity
#       |
#     post bypass     an add after the activation
#
# Each `_match_part(graph, op)` below returns a Match if `op` is that part of a layer, with the names of all parts from
# the weight down to `op`, and None otherwise. Inputs of a commutative op may come in either order; the first order that
# matches counts.

LAYERS: Final = frozenset({"Conv2D", "MatMul", "DepthwiseConv2dNative"})
ADDS: Final = frozenset({"Add", "AddV2"})
RELUS: Final = frozenset({"Relu", "Relu6"})
ACTIVATIONS: Final = RELUS | {"Identity"}
BATCH_NORMS: Final = frozenset({"FusedBatchNorm", "FusedBatchNormV3"})
#: The type of the ops that this rewrite inserts, and all types of fake quantization.
FAKE_QUANT: Final = "FakeQuantWithMinMaxVars"
FAKE_QUANTS: Final = frozenset({FAKE_QUANT, "FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVarsPerChannel"})
_VARIABLES: Final = frozenset({"Variable", "VariableV2"})


@dataclass(frozen=True, slots=True)
class Match:
    """The names of the ops that a layer consists of; None for a part that it does not have."""

    layer: str
    weight: str | None
    bias: str | None = None
    bypass: str | None = None
    activation: str | None = None
    post_bypass: str | None = None


_Pattern = Callable[[OpGraph, Op], Match | None]


def find_layers(graph: OpGraph) -> list[Match]:
    """Find every layer to quantize. Of several matches of a layer the longest is kept, and of these the first.

    The search goes from long to short: layers with a bypass after the activation, those that end at an activation,
    those that end at their bias, and those that another layer reads directly.
    """
    matches: dict[str, Match] = {}
    for pattern in (_match_post_bypass, _match_end_at_activation, _match_end_at_bias, _match_layer_read_by_layer):
        for op in graph:
            match = pattern(graph, op)
            if match is not None:
                matches.setdefault(match.layer, match)
    return list(matches.values())


# ---------------------------------------------------------------- from the weight down
def is_weight(graph: OpGraph, op: Op) -> bool:
    """Whether an op gives a layer its weight, so that it can be fake-quantized."""
    return op.type in ("Mul", "ReadVariableOp") or _is_variable_read(graph, op)


def _is_variable_read(graph: OpGraph, op: Op) -> bool:
    """Whether an op is an Identity of a variable, of the read of one, or of the concatenation of its partitions."""
    if op.type != "Identity" or len(op.inputs) != 1:
        return False
    (source,) = graph.inputs(op)
    if source.type == "ConcatV2" and len(source.inputs) == 3:
        source = graph.inputs(source)[0]
        return source.type == "Identity" and len(source.inputs) == 1 and graph.inputs(source)[0].type in _VARIABLES
    if source.type == "Identity" and len(source.inputs) == 1:
        (source,) = graph.inputs(source)
    return source.type in _VARIABLES


def _match_layer(graph: OpGraph, op: Op) -> Match | None:
    if op.type not in LAYERS or len(op.inputs) != 2 or _has_quantized_weight(graph, op):
        return None
    for source in reversed(graph.inputs(op)):
        if is_weight(graph, source):
            return Match(op.name, source.name)
    return None


def _has_quantized_weight(graph: OpGraph, op: Op) -> bool:
    """Whether a layer is quantized already; upstream would take a Mul among its inputs for its weight instead."""
    weight = graph.inputs(op)[1]
    return weight.type in FAKE_QUANTS and is_weight(graph, graph.inputs(weight)[0])


def _match_layer_output(graph: OpGraph, op: Op) -> Match | None:
    if op.type == "BatchToSpaceND" and len(op.inputs) == 3:
        return _match_layer(graph, graph.inputs(op)[0])
    return _match_layer(graph, op)


def _match_either_input(graph: OpGraph, op: Op, pattern: _Pattern) -> Match | None:
    """Apply `pattern` to both inputs of a binary op; the first match counts."""
    if len(op.inputs) != 2:
        return None
    first, second = graph.inputs(op)
    return pattern(graph, first) or pattern(graph, second)


def _match_plain_bias(graph: OpGraph, op: Op) -> Match | None:
    match = _match_either_input(graph, op, _match_layer_output) if op.type in ADDS | {"BiasAdd"} else None
    return match and replace(match, bias=op.name)


def _match_corrected_layer(graph: OpGraph, op: Op) -> Match | None:
    """A layer with the training corrections of a folded norm: a Mul (post_conv_mul) and an add (correction_add)."""

    def scaled(graph: OpGraph, op: Op) -> Match | None:
        return _match_either_input(graph, op, _match_layer_output) if op.type == "Mul" else None

    return _match_either_input(graph, op, scaled) if op.type in ADDS else None


def _match_folded_bias(graph: OpGraph, op: Op) -> Match | None:
    match = _match_either_input(graph, op, _match_corrected_layer) if op.type in ADDS else None
    return match and replace(match, bias=op.name)


def _match_bias(graph: OpGraph, op: Op) -> Match | None:
    return _match_plain_bias(graph, op) or _match_folded_bias(graph, op)


def _match_forced_norm(graph: OpGraph, op: Op) -> Match | None:
    """The Identity at the end of a folded batch norm whose moving averages are updated with the forward pass."""
    return _match_folded_bias(graph, graph.inputs(op)[0]) if op.type == "Identity" and len(op.inputs) == 1 else None


def _match_bypass(graph: OpGraph, op: Op) -> Match | None:
    def biased(graph: OpGraph, op: Op) -> Match | None:
        return _match_bias(graph, op) or _match_forced_norm(graph, op)

    match = _match_either_input(graph, op, biased) if op.type in ADDS else None
    return match and replace(match, bypass=op.name)


def _match_activation(graph: OpGraph, op: Op) -> Match | None:
    if op.type not in ACTIVATIONS or len(op.inputs) != 1:
        return None
    (source,) = graph.inputs(op)
    for pattern in (_match_bias, _match_forced_norm, _match_bypass, _match_layer):
        match = pattern(graph, source)
        if match is not None:
            return replace(match, activation=op.name)
    return None


# ---------------------------------------------------------------- the op at which a layer ends
def _match_post_bypass(graph: OpGraph, op: Op) -> Match | None:
    if op.type not in ADDS or len(op.inputs) != 2:
        return None
    first, second = graph.inputs(op)
    match = _match_activation(graph, second) or _match_activation(graph, first)
    return match and replace(match, post_bypass=op.name)


def _match_end_at_activation(graph: OpGraph, op: Op) -> Match | None:
    """A layer that ends at its activation.

    An Identity whose only reader is a batch norm is none: it belongs to the statistics of a norm that was folded.
    """
    match = _match_activation(graph, op)
    readers = graph.consumers(op.name)
    if op.type == "Identity" and len(readers) == 1 and readers[0].type in BATCH_NORMS:
        return None
    return match


def _match_end_at_bias(graph: OpGraph, op: Op) -> Match | None:
    match = _match_bias(graph, op)
    return match and Match(match.layer, match.weight, activation=op.name)


def _match_layer_read_by_layer(graph: OpGraph, op: Op) -> Match | None:
    """A layer that the layer `op` reads directly, such as the first half of a separable convolution.

    contrib.quantize does not quantize its weight if a batch norm was folded into it.
    """
    match = _match_either_input(graph, op, _match_layer_output) if op.type in LAYERS else None
    if match is None or match.weight is None:
        return None
    weight = None if graph[match.weight].type == "Mul" else match.weight
    return Match(match.layer, weight, activation=match.layer)


# ---------------------------------------------------------------- folding of batch norms
# A copy of the layer reads the folded weight, and the readers of the norm are rerouted to that copy. The original layer
# stays in the graph: in training it gives the statistics of the batch. Each scale and shift that upstream computes with
# several ops is one op of type `BatchNormFold` here.

_NORM_FOLD: Final = "BatchNormFold"


@dataclass(frozen=True, slots=True)
class _FoldableNorm:
    """A layer and the batch norm that can be folded into it.

    Args:
        layer: whose weight the norm is folded into.
        to_space: the BatchToSpaceND of a dilated layer.
        output: the op whose readers are rerouted to the folded layer.
        parameters: the ops that give the norm's statistics and its affine parameters.
    """

    layer: Op
    to_space: Op | None
    output: str
    parameters: tuple[str, ...]


def fold_batch_norms(graph: OpGraph, *, training: bool) -> dict[str, str]:
    """Fold every batch norm that follows a layer: fused ones first, then those written out in several ops.

    Returns:
        For each new weight, layer and output the name of the op that it replaces.
    """
    stands_for: dict[str, str] = {}
    for match_norm in (_match_fused_norm, _match_unfused_norm):
        folded: set[str] = set()
        for norm in [n for op in graph if (n := match_norm(graph, op)) is not None]:
            if norm.layer.name not in folded and graph.consumers(norm.output):
                folded.add(norm.layer.name)
                stands_for |= _fold(graph, norm, training)
    return stands_for


def _layer_before(graph: OpGraph, op: Op) -> tuple[Op, Op | None] | None:
    """The layer whose output is `op`, and its BatchToSpaceND if it has one; None if `op` is no layer's output."""
    if op.type == "Identity" and len(op.inputs) == 1:
        (op,) = graph.inputs(op)
    to_space = None
    if op.type == "BatchToSpaceND" and len(op.inputs) == 3:
        to_space, op = op, graph.inputs(op)[0]
    return (op, to_space) if op.type in LAYERS and len(op.inputs) == 2 else None


def _match_fused_norm(graph: OpGraph, op: Op) -> _FoldableNorm | None:
    """A fused batch norm `(x, gamma, beta, mean, variance)`; that of a MatMul is between two reshapes."""
    if op.type not in BATCH_NORMS or len(op.inputs) != 5:
        return None
    source = graph.inputs(op)[0]
    if source.type == "Reshape" and len(source.inputs) == 2:
        source = graph.inputs(source)[0]
    layer_and_to_space = _layer_before(graph, source)
    if layer_and_to_space is None:
        return None
    output = op.name
    if layer_and_to_space[0].type == "MatMul":
        reshapes = [r for r in graph.consumers(op.name) if r.type == "Reshape" and r.inputs[0] == op.name]
        if not reshapes:
            return None
        output = reshapes[0].name
    return _FoldableNorm(*layer_and_to_space, output, op.inputs[1:])


def _match_unfused_norm(graph: OpGraph, op: Op) -> _FoldableNorm | None:
    """A batch norm written out as `x * s + (beta - mean * s)`."""
    if op.type not in ADDS or len(op.inputs) != 2:
        return None
    scaled, shift = sorted(graph.inputs(op), key=lambda o: o.type)
    if (scaled.type, shift.type) != ("Mul", "Sub") or len(shift.inputs) != 2 or len(scaled.inputs) != 2:
        return None
    scaled_mean = graph.inputs(shift)[1]
    if scaled_mean.type != "Mul" or scaled.inputs[1] not in scaled_mean.inputs:
        return None
    layer_and_to_space = _layer_before(graph, graph.inputs(scaled)[0])
    if layer_and_to_space is None:
        return None
    return _FoldableNorm(*layer_and_to_space, op.name, (scaled.inputs[1], shift.name))


def _fold(graph: OpGraph, norm: _FoldableNorm, training: bool) -> dict[str, str]:
    """Add the folded copy of the layer under contrib.quantize's names; see `fold_batch_norms` for the result."""
    # looked up again, because an earlier fold may have rerouted the layer's inputs
    layer, scope = graph[norm.layer.name], scope_of(norm.layer.name)
    readers = [op.name for op in graph.consumers(norm.output)]

    def add_fold_op(name: str) -> str:
        return graph.add(within(scope, f"BatchNorm_Fold/{name}"), _NORM_FOLD, *norm.parameters)

    weight = layer.inputs[1]
    if training:
        weight = graph.add(within(scope, "correction_mult"), "Mul", add_fold_op("correction_scale"), weight)
    weight = graph.add(within(scope, "mul_fold"), "Mul", weight, add_fold_op("scale"))
    folded = output = graph.add(f"{layer.name}_Fold", layer.type, layer.inputs[0], weight)
    if norm.to_space is not None:
        to_space = norm.to_space
        output = graph.add(f"{to_space.name}_Fold", to_space.type, output, *to_space.inputs[1:])
    if training:
        output = graph.add(within(scope, "post_conv_mul"), "Mul", add_fold_op("correction_recip"), output)
        output = graph.add(within(scope, "correction_add"), "AddV2", output, add_fold_op("correction_offset"))
    output = graph.add(within(scope, "add_fold"), "AddV2", output, add_fold_op("bias"))
    graph.reroute(norm.output, output, readers)
    return {weight: layer.inputs[1], folded: layer.name, output: norm.output}


# ---------------------------------------------------------------- fake quantization

Role = Literal["weight", "activation"]

_ARITHMETIC: Final = ADDS | {"Mul"}
_TRANSPARENT: Final = frozenset({"Reshape", "Identity", "BatchToSpaceND", "SpaceToBatchND", "MaxPool", "Max"})
_APPLIES: Final = ("Apply", "ResourceApply", "ResourceSparseApply", "SparseApply")


@dataclass(frozen=True, slots=True)
class FakeQuantOp:
    """One fake quantization that `quantize_ops` inserted.

    Args:
        name: its scope, e.g. "a/act_quant".
        producer: the op whose value is quantized.
        consumers: the ops that read the quantized value.
        role: `weight` (LastValueQuantize with a narrow range) or `activation` (MovingAvgQuantize).
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    role: Role


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The result of `quantize_ops`: a graph with fake quantization.

    Args:
        ops: the given ops, then the inserted ones.
        fake_quants: in the order of their insertion.
        stands_for: for each weight, layer and output of a folded batch norm, the op that it replaces.
    """

    ops: tuple[Op, ...]
    fake_quants: tuple[FakeQuantOp, ...]
    stands_for: Mapping[str, str]


def quantize_ops(ops: Iterable[Op], *, training: bool = True, scope: str | None = None) -> Rewritten:
    """Rewrite a float graph to a training graph or an eval graph with fake quantization.

    The inserted fake quantizations and their places:

        weights_quant                  after the weight, or after the product of a folded batch norm
        act_quant                      after the activation, or after the bias if there is no activation
        conv_quant, add_quant          before and after a bypass; add_quant only if no activation follows
        post_activation_bypass_quant   after an add that follows an activation, unless a relu follows it
        activation_<type>_quant        after other adds and products of quantized tensors, unless a relu follows

    Args:
        ops: of the float model, with or without its loss; in the order of their creation.
        training: fold batch norms with the corrections of the training graph.
        scope: quantize only ops in this scope; None for all.

    Raises:
        HagoError: the graph contains ops that apply gradients.
        GraphError: names are not unique, or an op reads one that is not in the graph.

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
        inserter.insert_for_layer(match)
    inserter.insert_for_arithmetic()
    return Rewritten(tuple(graph), tuple(inserter.fake_quants), stands_for)


class _Inserter:
    """Inserts fake quantizations into a graph; made by `quantize_ops` for one rewrite.

    Attributes:
        fake_quants: those inserted so far.
        quantized: the ops whose output a layer's fake quantization covers.
    """

    def __init__(self, graph: OpGraph, scope: str | None) -> None:
        self.graph = graph
        self.scope = "" if not scope else scope.rstrip("/") + "/"
        self.fake_quants: list[FakeQuantOp] = []
        self.quantized: set[str] = set()

    def insert_for_layer(self, match: Match) -> None:
        """Insert the fake quantizations of one layer."""
        context = scope_of(match.layer)
        outer = scope_of(context) if match.bypass else context
        if match.weight is not None:
            self._insert(within(context, "weights_quant"), match.weight, "weight", check_producer=False)
        if match.activation is not None:
            self._insert(within(outer, "act_quant"), match.activation, check_consumers=False)
            self.quantized.add(match.activation)
        if match.bypass is not None and match.bias is not None:
            self._insert(within(context, "conv_quant"), match.bias)
            self.quantized.add(match.bias)
            if not self._is_read_by(match.bypass, ACTIVATIONS):
                self._insert(within(outer, "add_quant"), match.bypass)
                self.quantized.add(match.bypass)
        if match.post_bypass is not None and not self._is_read_by(match.post_bypass, RELUS):
            name = within(scope_of(match.post_bypass), "post_activation_bypass_quant")
            self._insert(name, match.post_bypass, check_consumers=False)
            self.quantized.add(match.post_bypass)

    def insert_for_arithmetic(self) -> None:
        """Insert the fake quantizations of adds and products of quantized tensors."""
        for op in self.graph:
            if self._reads_quantized(op):
                self._insert(f"{op.name}/activation_{op.type}_quant", op.name, check_consumers=False)

    def _is_read_by(self, name: str, kinds: frozenset[str]) -> bool:
        """Whether an op of these types reads a tensor, directly or through its fake quantization."""
        for op in self.graph.consumers(name):
            readers = self.graph.consumers(op.name) if op.type == FAKE_QUANT else (op,)
            if any(reader.type in kinds for reader in readers):
                return True
        return False

    def _reads_quantized(self, op: Op) -> bool:
        """Whether an add or product reads a fake-quantized tensor, directly or through the ops that it reads."""
        op = self.graph[op.name]  # insertions may have rerouted its inputs
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
            if source.type in _ARITHMETIC and any(self._reads_quantized(o) for o in self.graph.inputs(source)):
                return True
        return False

    def _insert(
        self,
        name: str,
        source: str,
        role: Role = "activation",
        *,
        check_producer: bool = True,
        check_consumers: bool = True,
    ) -> None:
        """Fake-quantize the output of `source`, unless it is fake-quantized already or outside the scope.

        Args:
            name: the scope of the fake quantization, made unique.
            check_producer, check_consumers: whether `source` and its readers must be in the scope.
        """
        readers = [op.name for op in self.graph.consumers(source)]
        checked = [source] * check_producer + readers * check_consumers
        if not all(n.startswith(self.scope) for n in checked) or self._is_fake_quantized(source):
            return
        name = self.graph.unique(name)
        quantized = self.graph.add(f"{name}/{FAKE_QUANT}", FAKE_QUANT, source)
        self.graph.reroute(source, quantized, readers)
        self.fake_quants.append(FakeQuantOp(name, source, tuple(readers), role))

    def _is_fake_quantized(self, source: str) -> bool:
        """Whether a tensor is read by a fake quantization, directly or through reshapes and identities."""
        pending: Sequence[Op] = self.graph.consumers(source)
        while pending:
            if any(op.type in FAKE_QUANTS for op in pending):
                return True
            pending = [c for op in pending if op.type in ("Reshape", "Identity") for c in self.graph.consumers(op.name)]
        return False
