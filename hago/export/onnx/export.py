"""What of a plan ONNX cannot say, all of it at once, before anything is written."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hago.arithmetic.numerics import EXACT_FLOAT32
from hago.arithmetic.types import INT32, Edge, SimQ
from hago.errors import HagoError, did_you_mean
from hago.export.onnx.file import OnnxFile, Walk
from hago.export.onnx.integers import IN_INT32
from hago.export.onnx.operators import check_real
from hago.export.onnx.qdq import emit_qdq
from hago.export.onnx.qoperator import emit_qoperator
from hago.export.onnx.values import ROUNDED, Value, quantizes_to
from hago.export.onnx.writer import load_onnx
from hago.graph.graph import CONST, INPUT, OUTPUT, Node
from hago.plan.plan import NodePlan, Plan
from hago.plan.topology import varies_along

#: The forms of an op that ONNX operators have.
SUM_FORMS: Final = ("common_scale", "dequantize", "qlinear")

_ENDS: Final = {
    "wrap": "wraps",
    "saturate_end": "saturates",
    "saturate_pairs": "saturates in pairs",
    "wrap_pairs": "wraps in pairs",
    "saturate_each": "saturates at every addition",
}


def check_plan(plan: Plan, form: str) -> None:
    """Refuse a plan that the ONNX form cannot express.

    Raises:
        HagoError: every node and edge that stands in the way, with the reason.
    """
    found = list(_findings(plan, form))
    if found:
        listed = "\n".join(f"  {f}" for f in dict.fromkeys(found))
        raise HagoError(f"ONNX in {form} form cannot express this strategy for {plan.hardware.name}:\n{listed}")


def _findings(plan: Plan, form: str) -> Iterator[str]:
    for node in plan.graph:
        if node.op in (INPUT, CONST):
            continue
        if (why := check_real(node)) is not None:
            yield f"node {node.name!r}: {why}"
        if node.name in plan.nodes:
            yield from _node(plan, node, plan.nodes[node.name], form)
    for edge, simq in plan.edges.items():
        if simq is not None and (edge.dst == OUTPUT or edge.slot not in _consts(plan, edge)):
            yield from _edge(plan, edge, simq, form)


def _consts(plan: Plan, edge: Edge) -> tuple[int, ...]:
    node = plan.nodes.get(edge.dst)
    return () if node is None else tuple(node.consts)


def _node(plan: Plan, node: Node, made: NodePlan, form: str) -> Iterator[str]:
    register, desc = made.desc.register, made.desc
    if desc.form not in (None, *SUM_FORMS):
        yield f"node {node.name!r}: {node.op} is computed in the form {desc.form}; ONNX has no operator that does that"
    if not made.proved and (register.overflow != "wrap" or register.dtype != INT32):
        yield (
            f"node {node.name!r}: sums may leave the register, up to {max(made.bound, made.raw_bound):.0f} in "
            f"{register.dtype}, which {_ENDS[register.overflow]}; ONNX sums in int32 that wraps. Take fewer bits"
        )
    elif register.dtype.bits > 32 and max(made.bound, made.raw_bound) > INT32.max:
        yield f"node {node.name!r}: sums reach {made.bound:.0f}; ONNX sums in int32. Take fewer bits"
    elif form == "qoperator" and _beyond_float32(plan, node, made):
        only = f"ONNX has {node.op} in float32 only, which ends at 2**24"
        yield f"node {node.name!r}: sums reach {made.bound:.0f}; {only}"
    if made.out_simq is not None and desc.form in (None, "common_scale"):
        yield from _edge(plan, Edge(node.name, 0), made.out_simq, form, f"node {node.name!r}")


def _beyond_float32(plan: Plan, node: Node, made: NodePlan) -> bool:
    """Whether a sum that is carried in float32 may be rounded there, where the plan rounds nothing."""
    if made.bound < EXACT_FLOAT32:
        return False
    shifts = plan.hardware.requantize.form == "shift"
    in_integers = node.op in IN_INT32 or node.op in ("mean", "sum") or "avg_pool" in node.op
    return shifts or not (made.within_hull or in_integers)


def _edge(plan: Plan, edge: Edge, simq: SimQ, form: str, where: str = "") -> Iterator[str]:
    where, how = where or f"edge {str(edge)!r}", plan.hardware.requantize
    for q in (simq.source, simq.target):
        if q is not None and len(varies_along(q.scale, q.scale.ndim)) > 1:
            yield f"{where}: scales vary along several axes; ONNX has one per tensor or per entry of one axis"
    if simq.target is None:
        return
    if simq.source is not None and how.form == "multiplier_shift":
        yield f"{where}: {how.form} requantizes by an integer and a shift; ONNX multiplies by a float32"
    if how.rounding not in ROUNDED:
        yield f"{where}: rounds {how.rounding}; ONNX has {', '.join(ROUNDED)}"
    if form == "qdq" and how.rounding != "half_even":
        yield f"{where}: rounds {how.rounding}; QuantizeLinear rounds half to even. Take the form qoperator"
    target = simq.target.dtype
    if form == "qdq" and not quantizes_to(target):
        yield (
            f"{where}: holds {_bits(simq)} bits in {target}; QuantizeLinear writes at most 16. "
            "Take the form qoperator, or another hardware"
        )


def _bits(simq: SimQ) -> int:
    assert simq.target is not None
    return (simq.target.qmax - simq.target.qmin).bit_length()


# ---------------------------------------------------------------- onnx export
# Export to ONNX: a plan, checked against what ONNX can say, as a model in QDQ or QOperator form.

FORMS: Final[Mapping[str, Callable[[Walk, Node, NodePlan], Value]]] = {"qdq": emit_qdq, "qoperator": emit_qoperator}


def make_onnx(plan: Plan, form: str = "qdq") -> OnnxFile:
    """The model, in memory.

    Args:
        form: qdq, which engines fuse into integer operators, or qoperator, which is made of them.

    Raises:
        HagoError: ONNX cannot express the plan; every node and edge in the way is named. Or the package onnx is
            not installed.
    """
    if form not in FORMS:
        raise HagoError(f"unknown ONNX form {form!r}; expected one of {', '.join(FORMS)}." + did_you_mean(form, FORMS))
    load_onnx()
    check_plan(plan, form)
    made = Walk(plan, FORMS[form]).file(form, {"hago.hardware": plan.hardware.name, "hago.form": form})
    _check(made.model)
    return made


def write_onnx(made: OnnxFile, path: str | os.PathLike[str]) -> None:
    """Write a model, under its name only once it is whole.

    Raises:
        HagoError: the file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(made.model.SerializeToString())
        os.replace(temporary, target)
    except (OSError, ValueError) as error:
        temporary.unlink(missing_ok=True)
        raise HagoError(f"cannot write {target}: {error}") from None


def _check(model: Any) -> None:
    onnx = load_onnx()
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise HagoError(f"onnx refuses the model that hago made: {error}") from None
