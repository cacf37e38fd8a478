"""Thresholds from data: the statistics of one streaming pass, and the estimators that read them."""

from hago.calibration.collect import Calibration
from hago.calibration.estimators import ESTIMATORS, estimator
from hago.calibration.statistics import Estimator, TensorStatistics

__all__ = [
    "ESTIMATORS",
    "Calibration",
    "Estimator",
    "TensorStatistics",
    "estimator",
]
