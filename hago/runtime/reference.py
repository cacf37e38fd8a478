"""The integer model: a Plan computed on integers, by the reference engine.

Every value is stored in its storage dtype (int8, uint8, int16, int32 ...) as q, zero point included; arithmetic is
int64. The simulator has its own schedule and carriers. It shares the Plan, the op rules, `arithmetic.numerics` and
`graph.execute` with this engine. Tests check that the two agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Final

import torch
from torch import Tensor, nn

from hago.arithmetic.numerics import Requantize, apply_simq, dequantize
from hago.arithmetic.types import Edge, QParams, SimQ
from hago.errors import HagoError
from hago.graph import OUTPUT, Node, autocast_off, check_inputs, compute_laid_out, laid_out, nesting_of, run_graph
from hago.ops import OPS, OpRule
from hago.plan import NodePlan, Plan, user_rules
from hago.runtime.compiling import register, run_compiled
from hago.runtime.stored_model import Provenance, StoredSize, from_file_bytes, save_plan, to_file_bytes
from hago.serialization.summary import Summarized, Summary, figures_text
from hago.serialization.text_table import counted

OnStoredEdge = Callable[[Edge, Any], None]


_NO_TORCHSCRIPT: Final = (
    "an integer model cannot be traced or scripted by torch.jit: TorchScript does not see its kernels. Save it with "
    "model.save(path) and load it with hago.load_integer_model, call torch.compile, or write ONNX with "
    "Quantizer.export_onnx"
)


class IntegerModel(Summarized, nn.Module):
    """A module that computes a Plan on integers; its inputs and outputs are real values.

    `Quantizer.realize` and `hago.load_integer_model` make it. Weights are buffers in their storage dtypes, named
    `node:slot` with slashes for dots. It can be copied and pickled, for which it is converted to its stored form.

    Args:
        plan: the Plan to compute.
        provenance: the origin of the Plan, which is stored with it.
    """

    #: How it computes, in words.
    engine = "reference: every node in int64"

    def __init__(self, plan: Plan, provenance: Provenance | None = None) -> None:
        super().__init__()
        self.plan, self.provenance = plan, provenance
        self._nesting, self._handle = nesting_of(plan.graph), register(self)
        shared: dict[tuple[str, object], Tensor] = {}
        for edge, values, qparams in _constants(plan):
            stored = store(values, qparams)
            first = shared.setdefault((plan.graph.source(edge), qparams.key), stored)
            self.register_buffer(_buffer(edge), first if first.equal(stored) else stored)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, nested like those of the float model."""
        leaves = self._nesting.leaves(args, kwargs)
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            return self._nesting.nested(run_compiled(leaves, self._handle))
        if _is_traced():
            raise HagoError(_NO_TORCHSCRIPT)
        return self._nesting.nested(self.run(check_inputs(self.plan.graph, leaves)))

    def run(
        self,
        inputs: Sequence[Tensor],
        on_value: Callable[[Node, Any], None] | None = None,
        on_edge: OnStoredEdge | None = None,
    ) -> list[Any]:
        """The outputs for flat inputs.

        Args:
            on_value: called with every node and its stored integers.
            on_edge: called with every edge of an integer node and the centered integers that arrive on it.
        """

        def step(node: Node, values: Sequence[Any]) -> Any:
            if node.name in self.plan.nodes:
                node_plan = self.plan.nodes[node.name]
                return compute_integer(self.plan, node, node_plan, values, self._constant, on_edge)
            return compute_float(self.plan, node, values, self._constant, self.plan.edges)

        with torch.no_grad(), autocast_off():
            outputs = run_graph(self.plan.graph, inputs, step, on_value=on_value)
            return [laid_out(real_value(self.plan.edges[Edge(OUTPUT, i)], v)) for i, v in enumerate(outputs)]

    def summary(self) -> Summary:
        """The engine and the facts of its Plan, with the measures of the strategy that it was made from."""
        graph = self.plan.graph
        figures = {} if self.provenance is None else self.provenance.made_by.get("results", {})
        facts = {
            "engine": self.engine,
            "inputs": graph.summary().facts["inputs"],
            **self.plan.summary().facts,
            "score": figures_text(figures),
        }
        return Summary(
            f"IntegerModel of a network of {counted(len(graph.computed), 'node')} for {self.plan.hardware.name}", facts
        )

    def save(self, path: str | PathLike[str]) -> StoredSize:
        """Write the model to a file, from which `hago.load_integer_model` makes a model with equal outputs.

        Returns:
            The sizes of the file and of the float model's weights.

        Raises:
            GraphError: a node cannot be stored; the message names it, and nothing is written.
            ModelFileError: the file could not be written; a file that was there is unchanged.
        """
        return save_plan(path, self.plan, self.provenance)

    def __prepare_scriptable__(self) -> Any:
        """Refuse `torch.jit.script`, which calls this.

        Raises:
            HagoError: always.
        """
        raise HagoError(_NO_TORCHSCRIPT)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), to_file_bytes(self.plan, self.provenance), user_rules(self.plan.ops))

    def _load_from_state_dict(self, *given: Any) -> None:
        """Accept only the values of this Plan, since weights are part of it; report others as load errors."""
        before = {name: buffer.clone() for name, buffer in self.named_buffers(recurse=False, remove_duplicate=False)}
        super()._load_from_state_dict(*given)
        changed = [name for name, buffer in before.items() if not _same(self.get_buffer(name), buffer)]
        for name in changed:
            setattr(self, name, before[name])
        if changed:
            prefix, errors = given[1], given[-1]
            errors.append(
                f"{', '.join(prefix + name for name in changed)}: not this integer model's own values. Its weights are "
                "a part of its plan; load another model with hago.load_integer_model, or quantize the network that has "
                "these weights"
            )

    def _constant(self, node: str, slot: int) -> Tensor:
        """The q of a constant operand, in its storage dtype."""
        return self.get_buffer(_buffer(Edge(node, slot)))


def _is_traced() -> bool:
    """Whether `torch.jit.trace` is recording."""
    untyped: Any = torch.jit
    return bool(untyped.is_tracing())


def _same(loaded: Tensor, buffer: Tensor) -> bool:
    """Whether a loaded tensor equals the buffer of a model, device and dtype included."""
    return loaded.device == buffer.device and loaded.dtype == buffer.dtype and loaded.equal(buffer)


def compute_float(
    plan: Plan,
    node: Node,
    values: Sequence[Any],
    constant: Callable[[str, int], Tensor],
    simqs: Mapping[Edge, SimQ | None],
) -> Any:
    """The value of a float node from the stored values of its inputs.

    Args:
        constant: returns the q of a weight that is stored in integers, by node and slot, or its real values if the
            conversion of its edge is None.
        simqs: the conversions of the node's edges; None for values that are real already.
    """
    edges = zip(node.edges, values, strict=True)
    stored = [(simqs[e], constant(e.dst, e.slot) if e in plan.weights else v) for e, v in edges]
    return compute_laid_out(node, [real_value(simq, v) for simq, v in stored], plan.ops)


def compute_integer(
    plan: Plan,
    node: Node,
    node_plan: NodePlan,
    values: Sequence[Any],
    constant: Callable[[str, int], Tensor],
    on_edge: OnStoredEdge | None = None,
    *,
    floats: bool = False,
) -> Tensor:
    """The stored value of an integer node from the stored values of its inputs, computed in int64.

    Args:
        node_plan: the node's plan. A value on an edge whose SimQ is None is used without a conversion.
        constant: returns the q of a constant operand, by node and slot.
        on_edge: called with every edge of the node and the centered integers that arrive on it.
        floats: whether the op computes on float carriers, which hold its integers exactly, instead of int64.
    """
    how = plan.hardware.requantize
    operands = [_operand(node_plan, node.name, slot, value, constant, how) for slot, value in enumerate(values)]
    if on_edge is not None:
        for edge, operand in zip(node.edges, operands, strict=True):
            on_edge(edge, operand)
    if node_plan.table is not None:
        return store(node_plan.look_up(operands[0]), node_plan.out)
    rule = plan.ops[node.op]
    if floats:
        carried = [operand.to(node_plan.operand_carrier) for operand in operands]
        c = rule.compute_int_in_parts(node_plan.attrs, carried, node_plan.parts).to(torch.int64)
    else:
        c = rule.compute_int(node_plan.attrs, *operands)
    return store(
        apply_simq(node_plan.apply_register(c, node_plan.lost(operands)), node_plan.out_simq, how), node_plan.out
    )


def _operand(
    node_plan: NodePlan, node: str, slot: int, value: Any, constant: Callable[[str, int], Tensor], how: Requantize
) -> Any:
    """The centered int64 integers of an operand, which was stored in its storage dtype before."""
    qparams, simq = node_plan.operands[slot], node_plan.simqs[slot]
    if slot in node_plan.consts:
        assert qparams is not None
        return center(constant(node, slot), qparams)
    if simq is None:
        return value if qparams is None else center(value, qparams)
    moved = move_stored(value, simq, how)
    return moved if simq.target is None else center(moved, simq.target)


def move_stored(value: Tensor, simq: SimQ, how: Requantize) -> Tensor:
    """Apply the conversion of an edge to a stored value.

    Returns:
        The q at the target of the conversion; real values if it has no target.
    """
    if simq.source is not None:
        value = center(value, simq.source)
    moved = apply_simq(value, simq, how)
    return moved if simq.target is None else store(moved, simq.target)


def _restored(kind: type[IntegerModel], data: bytes, rules: Mapping[str, OpRule]) -> IntegerModel:
    return kind(*from_file_bytes(data, "an integer model", {**OPS, **rules}))


def store(c: Tensor, qparams: QParams) -> Tensor:
    """Convert centered integers to q in the storage dtype."""
    return (c.to(torch.int64) + qparams.spread_over(c.shape).zero_point).to(qparams.dtype.torch)


def center(q: Tensor, qparams: QParams) -> Tensor:
    """Convert stored q to centered integers in int64."""
    return q.to(torch.int64) - qparams.spread_over(q.shape).zero_point


def real_value(simq: SimQ | None, value: Any) -> Any:
    """A stored value as a float node reads it: dequantized if it holds integers."""
    if simq is not None and simq.source is not None:
        return dequantize(center(value, simq.source), simq.source)
    return value


def _constants(plan: Plan) -> Iterator[tuple[Edge, Tensor, QParams]]:
    """The integer constants of all nodes, weights of float nodes included: (edge, centered integers, qparams)."""
    for name, node in plan.nodes.items():
        for slot, values in node.consts.items():
            qparams = node.operands[slot]
            assert qparams is not None
            yield Edge(name, slot), values, qparams
    for edge, weight in plan.weights.items():
        yield edge, weight.integers, weight.qparams


def _buffer(edge: Edge) -> str:
    return str(edge).replace(".", "/")
