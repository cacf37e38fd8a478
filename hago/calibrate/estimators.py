"""The threshold estimators by name, and the reading of "name:options"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Final, cast

from hago.calibrate.avg_range import AvgRange
from hago.calibrate.kl_estimate import KlEstimate
from hago.calibrate.max_range import MaxRange
from hago.calibrate.mse import Mse
from hago.calibrate.percentile import Percentile
from hago.calibrate.power2_range import Power2Range
from hago.calibrate.statistics import Estimator
from hago.errors import HagoError, did_you_mean

ESTIMATORS: Final[Mapping[str, type[Estimator]]] = {
    "avg_range": AvgRange,
    "kl_estimate": KlEstimate,
    "max_range": MaxRange,
    "mse": Mse,
    "percentile": Percentile,
    "power2_range": Power2Range,
}


def estimator(spec: str | Estimator) -> Estimator:
    """The estimator that `spec` names, e.g. "mse" or "percentile:99.9"; one that is given is returned.

    The options after the colon are numbers, separated by commas, in the order of the class's fields.
    `estimator(e.name) == e` for each of them.

    Raises:
        HagoError: no such estimator, or options that it does not take.
    """
    if not isinstance(spec, str):
        if isinstance(spec, type) or not callable(spec) or not hasattr(spec, "name"):
            raise HagoError(f"{spec!r} is no estimator; expected one of {', '.join(ESTIMATORS)}")
        return spec
    name, colon, rest = spec.strip().partition(":")
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
