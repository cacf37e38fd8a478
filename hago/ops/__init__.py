"""The operators that hago knows: one file each, found by reading this folder.

Nothing registers itself. `OPS` is a read-only mapping that functions take as a parameter (`ops=OPS`), so a user adds
an op as `{**OPS, "my_op": RULE}` without touching globals. The parts that rules are built from are exported here, too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from hago.ops import _opaque as opaque
from hago.ops._pool import pool_window
from hago.ops._rule import (
    ONE_ADDITION,
    Addends,
    Attrs,
    Call,
    IntegerForm,
    MatrixProduct,
    Operand,
    OpRule,
    Parsed,
    Ref,
    Refusal,
    Sample,
    Site,
    TermsAt,
    Weight,
    WindowsOf,
)
from hago.ops._shared import (
    arguments,
    binary,
    has_ref,
    joined,
    magnitude_bound,
    product_bound,
    product_scale,
    sum_bound,
)
from hago.ops.clamp import upper_clip
from hago.ops.forms.rescaled import COMMON_SUM_BITS, finest_common_scale, is_narrow
from hago.ops.forms.tpu_mlir import ATTRIBUTE_RECORDS

__all__ = [
    "ATTRIBUTE_RECORDS",
    "COMMON_SUM_BITS",
    "ONE_ADDITION",
    "OPS",
    "Addends",
    "Attrs",
    "Call",
    "IntegerForm",
    "MatrixProduct",
    "OpRule",
    "Operand",
    "Ops",
    "Parsed",
    "Ref",
    "Refusal",
    "Sample",
    "Site",
    "TermsAt",
    "Weight",
    "WindowsOf",
    "aliases",
    "arguments",
    "binary",
    "finest_common_scale",
    "has_ref",
    "is_narrow",
    "joined",
    "magnitude_bound",
    "opaque",
    "parsers",
    "pool_window",
    "product_bound",
    "product_scale",
    "sum_bound",
    "upper_clip",
]

Ops = Mapping[str, OpRule]


def _discover() -> dict[str, OpRule]:
    found: dict[str, OpRule] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg and m.name[0] != "_"):
        rule = importlib.import_module(f"{__name__}.{module}").RULE
        assert rule.name == module, f"hago/ops/{module}.py holds a rule called {rule.name!r}"
        found[module] = rule
    return found


class _Rules(dict[str, OpRule]):
    """Rules with a short repr, so that signatures with the default OPS can be read."""

    def __repr__(self) -> str:
        return "hago.ops.OPS"


OPS: Final[Ops] = MappingProxyType(_Rules(_discover()))


def aliases(ops: Ops = OPS) -> dict[str, str]:
    """A mapping from other spellings (the RFC's `nn.conv2d`, say) to op names."""
    return {alias: rule.name for rule in ops.values() for alias in rule.aliases}


def parsers(ops: Ops = OPS) -> dict[str, OpRule]:
    """A mapping from ATen calls to the rules that read them."""
    return {target: rule for rule in ops.values() for target in rule.aten}
