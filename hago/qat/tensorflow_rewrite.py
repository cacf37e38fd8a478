"""Where TensorFlow's contrib.quantize puts fake quantization into a graph: its training and eval graphs.

First batch norms are folded, then layers get their fake quantization, then what adds and multiplies
quantized tensors does. No tensor is fake-quantized twice, so a second rewrite changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hago.errors import HagoError
from hago.qat.tensorflow_match import ACTIVATIONS, ADDS, FAKE_QUANTS, RELUS, Match, find_layers
from hago.qat.tensorflow_norms import fold_batch_norms
from hago.qat.tensorflow_ops import Op, OpGraph, scope_of, within

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
