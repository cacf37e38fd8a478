"""hago finds, by search, how to run a neural network in low-precision integers on given hardware.

Importing it changes nothing and prints nothing. What a public name stands for is imported when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from hago.version import VERSION

if TYPE_CHECKING:
    from hago.analysis import measure_hardware
    from hago.api import (
        create_quantizer,
        estimate_cost,
        evaluate_strategy,
        explain,
        inspect_graph_statistic,
        load_integer_model,
        make_report,
        measure_sensitivity,
        quantize,
        replay,
        search_quantize_strategy,
    )
    from hago.arithmetic.numerics import simulated_quantize
    from hago.errors import HagoError, HagoWarning
    from hago.graph import Graph, from_torch
    from hago.hardware import (
        Accumulator,
        Hardware,
        OpDesc,
        available_hardware,
        create_sample_hardware,
        load_hardware,
        save_hardware,
    )
    from hago.plan import Strategy
    from hago.qat import finetune, from_qat, prepare_qat
    from hago.search import Quantizer, load_front

__version__ = VERSION

__all__ = [
    "Accumulator",
    "Graph",
    "HagoError",
    "HagoWarning",
    "Hardware",
    "OpDesc",
    "Quantizer",
    "Strategy",
    "available_hardware",
    "create_quantizer",
    "create_sample_hardware",
    "estimate_cost",
    "evaluate_strategy",
    "explain",
    "finetune",
    "from_qat",
    "from_torch",
    "inspect_graph_statistic",
    "load_front",
    "load_hardware",
    "load_integer_model",
    "make_report",
    "measure_hardware",
    "measure_sensitivity",
    "prepare_qat",
    "quantize",
    "replay",
    "save_hardware",
    "search_quantize_strategy",
    "simulated_quantize",
]

#: The modules that public names are imported from; the imports above say the same to type checkers.
_MODULES: Final = {
    "hago.analysis": "measure_hardware",
    "hago.api": "create_quantizer estimate_cost evaluate_strategy explain inspect_graph_statistic load_integer_model "
    "make_report measure_sensitivity quantize replay search_quantize_strategy",
    "hago.arithmetic.numerics": "simulated_quantize",
    "hago.errors": "HagoError HagoWarning",
    "hago.graph": "Graph from_torch",
    "hago.hardware": "Accumulator Hardware OpDesc available_hardware create_sample_hardware load_hardware "
    "save_hardware",
    "hago.plan": "Strategy",
    "hago.qat": "finetune from_qat prepare_qat",
    "hago.search": "Quantizer load_front",
}
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names.split()}


if not TYPE_CHECKING:  # a type checker would take every name for an attribute

    def __getattr__(name: str) -> object:
        """Import a public name, or a module of hago, such as `hago.ops`."""
        if name in _MODULE_OF:
            return getattr(import_module(_MODULE_OF[name]), name)
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
