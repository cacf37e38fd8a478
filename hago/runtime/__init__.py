"""Integer models: the reference engine, the native engine, stored models, and the exactness check."""

from hago.runtime import native
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.reference import IntegerModel, center
from hago.runtime.stored_model import Provenance, StoredSize, float_bytes, is_stored, load_plan, save_plan

__all__ = [
    "IntegerModel",
    "Provenance",
    "StoredSize",
    "center",
    "compare_plan_exactly",
    "float_bytes",
    "is_stored",
    "load_plan",
    "native",
    "save_plan",
]
