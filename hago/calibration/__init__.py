"""Calibration: statistics of tensors from one streaming pass over the data, and estimators of thresholds."""

from hago.calibration.calibration import Calibration
from hago.calibration.estimators import ESTIMATORS, estimator
from hago.calibration.statistics import Estimator, TensorStatistics

__all__ = [
    "ESTIMATORS",
    "Calibration",
    "Estimator",
    "TensorStatistics",
    "estimator",
]
