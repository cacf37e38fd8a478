"""hago finds, by search, how to run a neural network in low-precision integers on given hardware.

Importing it changes nothing and prints nothing.
"""

from hago.analysis import measure_hardware
from hago.api import (
    create_quantizer,
    estimate_cost,
    evaluate_strategy,
    explain,
    inspect_graph_statistic,
    load_integer_model,
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
from hago.version import VERSION

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
    "measure_hardware",
    "measure_sensitivity",
    "prepare_qat",
    "quantize",
    "replay",
    "save_hardware",
    "search_quantize_strategy",
    "simulated_quantize",
]
