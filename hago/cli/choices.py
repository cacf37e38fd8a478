"""The names and defaults that the help of the command line shows, as literals.

What defines them takes seconds to import, since it imports torch; `hago --help` and errors of usage answer at once. A
test compares every value with its definition, so a new searcher, say, is added to both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: `hago.searchers`: their names, and when to take each.
AUTO: Final = "auto"
SEARCHERS: Final[Mapping[str, str]] = {
    "default": "to measure the most bits with estimated thresholds, without a search",
    "gradient": "for the best accuracy without limits: refines thresholds, then tries few points",
    "random": "as a baseline for other searchers",
    "greedy": "for an objective of your own: lowers one value's bits at a time, by measurements",
    "annealing": "where greedy gets stuck and many trials are affordable",
    "exhaustive": "for spaces of some hundred points: evaluates every one",
    "sensitivity": "for a quick front with estimated thresholds",
    "limited": "for limits on costs, or the least cost: refines thresholds, tries points near limits",
    "pareto": "if no limit is known yet: finds the front of the objective and a cost",
    "tpe": "for hundreds of trials, also by many machines on one storage (Optuna)",
    "nsga2": "the same for a front: an evolutionary search (Optuna)",
    "gp": "for few groups of bits and slow trials: a Gaussian process (Optuna)",
    "rfc_greedy": "to compare with the greedy search of the HAGO RFC",
}
#: `hago.search.objective`.
OBJECTIVES: Final = ("sqnr", "kl", "mse", "cosine", "agreement", "accuracy")
#: `hago.calibration`.
ESTIMATORS: Final = ("avg_range", "kl_estimate", "max_range", "mse", "percentile", "power2_range")
#: `hago.emulation.dorefa`.
DOREFAS: Final = ("dorefa", "dorefa_relative")
#: `hago.cost`: all metrics, and those that depend on which nodes stay float.
METRICS: Final = (
    "weight_bytes",
    "activation_bytes",
    "bytes_moved",
    "macs",
    "bops",
    "effective_bits",
    "requantized",
    "cycles",
    "latency",
    "energy",
)
FLOAT_METRICS: Final = ("bops", "cycles", "latency", "energy")
#: `hago.search.correcting`.
CORRECTIONS: Final = (
    *("rotation", "splitting", "equalization", "absorption"),
    *("thresholds", "rounding", "bias", "affine"),
    "reconstruction",
)
#: `hago.search.effort`.
EFFORTS: Final = ("fast", "good", "best")
#: `hago.data`.
BATCH_SIZE: Final = 64
EXPECTED_DATA: Final = "an .npz file, a folder of images, or package.module:callable"
#: The mean and the standard deviation by which images are left as they are.
NO_MEAN: Final = (0.0,)
UNIT_STD: Final = (1.0,)
#: `hago.analysis.comparison`.
REALIZATIONS: Final = ("reference", "fast", "simulated", "onnxruntime", "openvino", "float")
#: `hago.analysis.speed`.
BATCH_SIZES: Final = (1, 32)
ROUNDS: Final = 11
#: `hago.report`.
POINTS: Final = 5
#: `hago.runtime.native`.
ENGINES: Final = ("auto", "reference")
#: `hago.qat`: losses and schemes, and the defaults of `FinetuneOptions`.
LOSSES: Final = ("mse", "kl", "labels")
TRAINING_SCHEMES: Final = ("hago", "lsq", "nudged", "tensorflow", "oneflow", "pytorch", "dorefa", "dorefa_relative")
#: `hago.demo`.
DEMO_HARDWARE: Final = ("x86_vnni", "int16_accumulator")


@dataclass(frozen=True, slots=True)
class TrainingDefaults:
    """The defaults of the fields of `hago.qat.FinetuneOptions` that `hago finetune` has options for."""

    lr: float = 2e-3
    range_lr: float = 2e-3
    batch_size: int = 32
    objective: str = "mse"
    scheme: str = "lsq"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ExportChoices:
    """The text of an export format, and the choices of each of its options, the first of which is the default."""

    text: str
    options: Mapping[str, tuple[str, ...]]


#: `hago.export`.
EXPORT_FORMATS: Final[Mapping[str, ExportChoices]] = {
    "onnx": ExportChoices(
        "a model for ONNX Runtime and others",
        {"form": ("qdq", "qoperator"), "engine": ("onnxruntime", "openvino")},
    ),
    "tpu-mlir": ExportChoices("a calibration table and a quantize table", {}),
    "model_explorer": ExportChoices("the graph and its figures for Model Explorer", {}),
}
