"""Passes: a quantized pass through batch norms in training, and a pass that is not quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hago.execute import compute_real
from hago.graph import Node
from hago.plan import NodePlan
from hago.qat.live import LivePass
from hago.qat.moves import to_real
from hago.qat.norms import Folded, FoldedNorm, Layer
from hago.qat.operands import extremes
from hago.qat.training import Training
from hago.topology import weight_edge
from hago.types import QParams

Norms = Mapping[str, FoldedNorm]


class NormedPass(LivePass):
    """A quantized pass in which layers have the batch norm of this batch.

    Args:
        norms: by layer.
    """

    def __init__(self, training: Training, norms: Norms, *, observing: bool) -> None:
        super().__init__(training, observing=observing)
        self.norms = norms
        self._folded: dict[str, Folded] = {}

    def __call__(self, node: Node, values: Sequence[Any]) -> Any:
        norm, plan = self.norms.get(node.name), self.plan.nodes.get(node.name)
        if norm is None:
            return super().__call__(node, values)
        if plan is None:
            return self._float_layer(node, norm, values[0])
        self._observe_operands(node, values[:1])
        first = self._operands(node).first(plan.desc)
        x = to_real(self._operand(node, plan, first, 0, values[0]), first)
        folded = self._folded[node.name] = norm.in_training(self._layer(node, x))
        return super().__call__(node, [values[0], folded.weight, folded.bias])

    def _float_layer(self, node: Node, norm: FoldedNorm, value: Any) -> Tensor:
        """A float layer, whose folded weight may rest as integers."""
        self.qparams[node.name] = None
        layer = self._layer(node, self.real(node.inputs[0], value))
        edge = weight_edge(node, self.ops)
        if edge is None or edge not in self.plan.weights:
            return norm.normalized(layer)
        folded = norm.in_training(layer)
        self._observe_operands(node, [value, folded.weight])
        weight = self._weight(node, edge, folded.weight)
        if folded.correction is None or folded.shift is None:
            return layer(weight, folded.bias)
        y = layer(weight, None)
        shape = [1, -1, *[1] * (y.ndim - 2)]
        return y * folded.correction.reshape(shape) + folded.shift.reshape(shape)

    def _layer(self, node: Node, x: Tensor) -> Layer:
        def layer(weight: Tensor, bias: Tensor | None) -> Tensor:
            found: Tensor = compute_real(node, [x, weight] if bias is None else [x, weight, bias], self.ops)
            return found

        return layer

    def _compute(self, node: Node, plan: NodePlan, targets: Sequence[QParams | None], operands: list[Any]) -> Tensor:
        folded = self._folded.get(node.name)
        if folded is None or folded.correction is None or folded.shift is None:
            return super()._compute(node, plan, targets, operands)
        register, attrs = self._register(node, plan, targets, None)
        c = self.ops[node.op].compute_int(attrs, *operands[:2])
        if self.gradients is not None:
            c = self.gradients(c)
        shape = [1, -1, *[1] * (c.ndim - 2)]
        # in quanta of the accumulator, though no longer whole ones
        shift = (folded.shift.reshape(shape) / register.scale).to(c.dtype)
        return self._leave(node, plan, register, c * folded.correction.reshape(shape) + shift)


class FloatPass:
    """A pass that is not quantized; ranges may take in what they see.

    Args:
        norms: by layer.
    """

    def __init__(self, training: Training, norms: Norms, *, observing: bool) -> None:
        self.training, self.norms, self.observing = training, norms, observing
        self.ops = training.plan.ops
        self._seen: set[int] = set()

    def __call__(self, node: Node, values: Sequence[Any]) -> Any:
        norm = self.norms.get(node.name)
        if norm is None:
            found = compute_real(node, values, self.ops)
        else:
            found = norm.normalized(lambda weight, bias: self._layer(node, values[0], weight, bias))
        plan = self.training.plan
        if self.observing and (node.name in plan.nodes or any(e in plan.weights for e in node.edges)):
            seen = values if norm is None else [values[0], *norm.folded()]
            for edge, value in zip(node.edges, seen, strict=True):
                self._observe(str(edge), node, value)
            self._observe(f"{node.name}:out", node, found)
        return found

    def _layer(self, node: Node, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = compute_real(node, [x, weight] if bias is None else [x, weight, bias], self.ops)
        return found

    def _observe(self, key: str, node: Node, value: Any) -> None:
        found = self.training.ranges.get(key)
        if found is not None and found.observes and id(found) not in self._seen:
            self._seen.add(id(found))
            form = self.ops[node.op].integer
            found.observe(*extremes(value, None, found, None if form is None else form.weight))
