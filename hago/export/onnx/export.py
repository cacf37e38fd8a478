"""Export of a Plan to ONNX, in QDQ or QOperator form.

`hago.export.formats` calls `make_onnx` and `write_onnx`. A Plan is checked before anything is written; the error names
every node and edge that ONNX cannot express.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hago.arithmetic.numerics import EXACT_FLOAT32, OVERFLOWS
from hago.arithmetic.types import INT32, Edge, SimQ
from hago.errors import HagoError, did_you_mean
from hago.export.onnx.builder import ModelBuilder, OnnxFile
from hago.export.onnx.integers import sums_in_int32, sums_in_int64
from hago.export.onnx.operators import unsupported_reason
from hago.export.onnx.qdq import write_qdq_node
from hago.export.onnx.qoperator import write_qoperator_node
from hago.export.onnx.values import REQUANTIZE_FORMS, ROUNDING_NODES, Value, quantizes_to
from hago.export.onnx.writer import load_onnx
from hago.graph import CONST, INPUT, OUTPUT, Node
from hago.plan import NodePlan, Plan
from hago.plan.topology import varies_along
from hago.serialization.json_text import replace_file

#: The named forms of ops (`OpDesc.form`) that ONNX operators compute; they also compute ops without a named form.
ONNX_FORMS: Final = ("common_scale", "dequantize", "qlinear")


def check_plan(plan: Plan, form: str) -> None:
    """Check that ONNX can express a Plan in this form.

    Raises:
        HagoError: it cannot; the message lists every such node and edge with the reason.
    """
    reasons = list(_refusals(plan, form))
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in dict.fromkeys(reasons))
        raise HagoError(f"ONNX in {form} form cannot express this strategy for {plan.hardware.name}:\n{listed}")


def _refusals(plan: Plan, form: str) -> Iterator[str]:
    """The nodes and edges that ONNX cannot express in this form, each with the reason."""
    for node in plan.graph:
        if node.op in (INPUT, CONST):
            continue
        if (why := unsupported_reason(node)) is not None:
            yield f"node {node.name!r}: {why}"
        if node.name in plan.nodes:
            yield from _node_refusals(plan, node, plan.nodes[node.name], form)
    for edge, simq in plan.edges.items():
        if simq is not None and (edge.dst == OUTPUT or edge.slot not in _constant_slots(plan, edge)):
            yield from _simq_refusals(plan, simq, form, f"edge {str(edge)!r}")


def _constant_slots(plan: Plan, edge: Edge) -> tuple[int, ...]:
    node = plan.nodes.get(edge.dst)
    return () if node is None else tuple(node.consts)


def _node_refusals(plan: Plan, node: Node, node_plan: NodePlan, form: str) -> Iterator[str]:
    register, desc = node_plan.desc.register, node_plan.desc
    largest = max(node_plan.bound, node_plan.raw_bound)
    if desc.form not in (None, *ONNX_FORMS):
        yield f"node {node.name!r}: {node.op} is computed in the form {desc.form}; ONNX has no operator that does that"
    if not node_plan.proved and (register.overflow != "wrap" or register.dtype != INT32):
        yield (
            f"node {node.name!r}: sums may leave the register, up to {largest:.0f} in {register.dtype}, "
            f"which {OVERFLOWS[register.overflow].verb}; ONNX sums in int32 that wraps. Take fewer bits"
        )
    elif register.dtype.bits > 32 and largest > INT32.max:
        yield f"node {node.name!r}: sums reach {node_plan.bound:.0f}; ONNX sums in int32. Take fewer bits"
    elif form == "qoperator" and not node_plan.proved and sums_in_int64(node.op):
        yield (
            f"node {node.name!r}: sums may leave the register, up to {largest:.0f} in {register.dtype}, which wraps; "
            f"the file sums {node.op} in int64. Take fewer bits"
        )
    elif form == "qoperator" and _float32_changes_sums(plan, node, node_plan):
        yield (
            f"node {node.name!r}: sums reach {node_plan.bound:.0f}; ONNX has {node.op} with such operands in float32 "
            "only, which ends at 2**24"
        )
    if node_plan.out_simq is not None and desc.form in (None, "common_scale"):
        yield from _simq_refusals(plan, node_plan.out_simq, form, f"node {node.name!r}")


def _float32_changes_sums(plan: Plan, node: Node, node_plan: NodePlan) -> bool:
    """Whether a sum of a node in the file may differ from that of the Plan because float32 does not hold it.

    The file adds in int32, in int64 or in float32, and stores the total in float32. To round the total changes nothing
    where the Plan multiplies it by a float32 ratio, which rounds it to float32, too (N3); a shift is exact.
    """
    if node_plan.bound < EXACT_FLOAT32:
        return False
    if plan.hardware.requantize.form == "shift":
        return True
    adds_exactly = sums_in_int32(node.op, node_plan.operands) or sums_in_int64(node.op)
    return not (node_plan.keeps_input_dtype or adds_exactly)


def _simq_refusals(plan: Plan, simq: SimQ, form: str, where: str) -> Iterator[str]:
    """Why ONNX cannot express a conversion on an edge or at a node's output; `where` names the edge or the node."""
    requantize = plan.hardware.requantize
    for q in (simq.source, simq.target):
        if q is not None and len(varies_along(q.scale, q.scale.ndim)) > 1:
            yield f"{where}: scales vary along several axes; ONNX has one per tensor or per entry of one axis"
    if simq.target is None:
        return
    if simq.source is not None and requantize.form not in REQUANTIZE_FORMS:
        means = "by an integer and a shift" if requantize.form == "multiplier_shift" else "in another arithmetic"
        yield f"{where}: {requantize.form} requantizes {means}; ONNX multiplies by a float32"
    if requantize.rounding not in ROUNDING_NODES:
        yield f"{where}: rounds {requantize.rounding}; ONNX has {', '.join(ROUNDING_NODES)}"
    if form == "qdq" and requantize.rounding != "half_even":
        yield f"{where}: rounds {requantize.rounding}; QuantizeLinear rounds half to even. Take the form qoperator"
    target = simq.target.dtype
    if form == "qdq" and not quantizes_to(target):
        yield (
            f"{where}: holds {_bits(simq)} bits in {target}; QuantizeLinear writes at most 16. "
            "Take the form qoperator, or another hardware"
        )


def _bits(simq: SimQ) -> int:
    assert simq.target is not None
    return (simq.target.qmax - simq.target.qmin).bit_length()


# ---------------------------------------------------------------- export
#: The function that writes an integer node in each form.
FORMS: Final[Mapping[str, Callable[[ModelBuilder, Node, NodePlan], Value]]] = {
    "qdq": write_qdq_node,
    "qoperator": write_qoperator_node,
}


def make_onnx(plan: Plan, form: str = "qdq") -> OnnxFile:
    """Make the ONNX model of a Plan, in memory.

    Args:
        form: `qdq`, float operators that engines fuse into integer ones, or `qoperator`, integer operators.

    Raises:
        HagoError: ONNX cannot express the plan, in which case every such node and edge is named; or the package onnx
            is not installed.
    """
    if form not in FORMS:
        raise HagoError(f"unknown ONNX form {form!r}; expected one of {', '.join(FORMS)}." + did_you_mean(form, FORMS))
    load_onnx()
    check_plan(plan, form)
    file = ModelBuilder(plan, FORMS[form]).build(form, {"hago.hardware": plan.hardware.name, "hago.form": form})
    _check_model(file.model)
    return file


def write_onnx(file: OnnxFile, path: str | os.PathLike[str]) -> None:
    """Write a model to a file, which is replaced atomically.

    Raises:
        HagoError: the file cannot be written.
    """
    replace_file(Path(path), file.model.SerializeToString())


def _check_model(model: Any) -> None:
    onnx = load_onnx()
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise HagoError(f"onnx refuses the model that hago made: {error}") from None
