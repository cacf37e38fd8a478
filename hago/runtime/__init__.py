"""Integer models: the reference engine, the native engine, stored models, and the exactness check."""

from hago.runtime.reference import IntegerModel
from hago.runtime.stored import load_plan, save_plan

__all__ = [
    "IntegerModel",
    "load_plan",
    "save_plan",
]
