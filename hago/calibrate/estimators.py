"""The threshold estimators by name, and the reading of "name:options"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Final, cast

from torch import Tensor

from hago.calibrate.avg_range import AvgRange
from hago.calibrate.kl_estimate import KlEstimate
from hago.calibrate.max_range import MaxRange
from hago.calibrate.mse import Mse
from hago.calibrate.percentile import Percentile
from hago.calibrate.power2_range import Power2Range
from hago.calibrate.statistics import Estimator, TensorStatistics
from hago.errors import HagoError, did_you_mean
from hago.qat.dorefa import DOREFAS
from hago.schemes import Grid

ESTIMATORS: Final[Mapping[str, type[Estimator]]] = {
    "avg_range": AvgRange,
    "kl_estimate": KlEstimate,
    "max_range": MaxRange,
    "mse": Mse,
    "percentile": Percentile,
    "power2_range": Power2Range,
}


@dataclass(frozen=True, slots=True)
class DoReFaEstimator:
    """DoReFa's weights, and activations by another estimator (or in [0, 1], where the scheme says so).

    Args:
        scheme: a name in DOREFAS.
        inner: of all that is no weight.
    """

    scheme: str
    inner: Estimator

    @property
    def name(self) -> str:
        return f"{self.scheme}:{self.inner.name}"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        return self.inner(statistics, grid)


def dorefa_of(estimator: Estimator) -> str | None:
    """The name in DOREFAS of what an estimator does to weights."""
    return estimator.scheme if isinstance(estimator, DoReFaEstimator) else None


def estimator(spec: str | Estimator) -> Estimator:
    """The estimator that `spec` names, e.g. "mse" or "percentile:99.9"; one that is given is returned.

    The options after the colon are numbers, separated by commas, in the order of the class's fields. Behind
    "dorefa" and "dorefa_relative" stands the estimator of all that is no weight, "mse" if nothing does.
    `estimator(e.name) == e` for each of them.

    Raises:
        HagoError: no such estimator, or options that it does not take.
    """
    if not isinstance(spec, str):
        if isinstance(spec, type) or not callable(spec) or not hasattr(spec, "name"):
            raise HagoError(f"{spec!r} is no estimator; expected one of {', '.join(ESTIMATORS)}")
        return spec
    name, colon, rest = spec.strip().partition(":")
    if name in DOREFAS:
        return DoReFaEstimator(name, estimator(rest or "mse"))
    if name not in ESTIMATORS:
        raise HagoError(f"unknown estimator {name!r}; known: {', '.join(ESTIMATORS)}.{did_you_mean(name, ESTIMATORS)}")
    kind = ESTIMATORS[name]
    options = rest.split(",") if colon else []
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if len(options) > len(known):
        raise HagoError(f"estimator {spec!r} has {len(options)} options; {name} takes {', '.join(known) or 'none'}")
    try:
        values = [float(option) for option in options]
    except ValueError:
        raise HagoError(f"the options of estimator {spec!r} must be numbers, e.g. 'percentile:99.9'") from None
    return cast("Callable[..., Estimator]", kind)(*values)
