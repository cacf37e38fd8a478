"""Export of a Plan to ONNX, in QDQ or QOperator form.

`hago.export.formats` calls `make_onnx` and `write_onnx`. A Plan is checked before anything is written, by
`hago.export.onnx.refusals`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hago.errors import HagoError, did_you_mean
from hago.export.onnx.builder import ModelBuilder, OnnxFile
from hago.export.onnx.qdq import write_qdq_node
from hago.export.onnx.qoperator import write_qoperator_node
from hago.export.onnx.refusals import check_plan
from hago.export.onnx.values import Value
from hago.export.onnx.writer import load_onnx
from hago.graph import Node
from hago.plan import NodePlan, Plan
from hago.serialization.json_text import replace_file

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
