"""Export to ONNX: a plan, checked against what ONNX can say, as a model in QDQ or QOperator form."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hago.errors import HagoError, did_you_mean
from hago.export.onnx_file import OnnxFile, Walk
from hago.export.onnx_limits import check_plan
from hago.export.onnx_qdq import emit_qdq
from hago.export.onnx_qoperator import emit_qoperator
from hago.export.onnx_values import Value
from hago.export.onnx_writer import load_onnx
from hago.graph import Node
from hago.plan import NodePlan, Plan

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
