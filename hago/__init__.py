"""hago finds, by search, how to run a neural network in low-precision integers on given hardware.

Importing it changes nothing and prints nothing.
"""

from hago.api import (
    create_quantizer,
    load_integer_model,
    quantize,
    replay,
    search_quantize_strategy,
)
from hago.errors import HagoError, HagoWarning
from hago.frontend.torch_export import from_torch
from hago.graph import Graph
from hago.hardware import Accumulator, Hardware, OpDesc, create_sample_hardware
from hago.hardware_file import available_hardware, load_hardware, save_hardware
from hago.measuring.hardware import measure_hardware
from hago.numerics import simulated_quantize
from hago.quantizer import Quantizer
from hago.reports import (
    estimate_cost,
    evaluate_strategy,
    explain,
    inspect_graph_statistic,
    measure_sensitivity,
)
from hago.searching.fronts import load_front
from hago.strategy import Strategy
from hago.training.finetuning import finetune
from hago.training.qat_model import from_qat, prepare_qat
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
