"""Calibration: statistics of tensors from one streaming pass over the data, and estimators of thresholds.

`collection` runs the model once; an `observer` per node fills a histogram; `statistics` holds the result.
"""

from hago.calibration.collection import SOFTMAX_SPAN, Calibration, collect, finite_masks
from hago.calibration.estimators import ESTIMATORS, Mse, dorefa_of, named_estimator
from hago.calibration.given_ranges import GivenRanges, ModesLike, ThresholdsLike, make_given_ranges
from hago.calibration.observer import count_in_bins
from hago.calibration.statistics import BINS, CHANNEL_BINS, Estimator, TensorStatistics
from hago.calibration.threshold_cache import ThresholdCache

__all__ = [
    "BINS",
    "CHANNEL_BINS",
    "ESTIMATORS",
    "SOFTMAX_SPAN",
    "Calibration",
    "Estimator",
    "GivenRanges",
    "ModesLike",
    "Mse",
    "TensorStatistics",
    "ThresholdCache",
    "ThresholdsLike",
    "collect",
    "count_in_bins",
    "dorefa_of",
    "finite_masks",
    "make_given_ranges",
    "named_estimator",
]
