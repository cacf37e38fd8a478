"""Names of estimators, and the reading of their options."""

from __future__ import annotations

import pytest

from hago.calibration.estimators import ESTIMATORS, Mse, Percentile, named_estimator
from hago.errors import HagoError


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_reads_the_name_of_every_estimator(name: str) -> None:
    made = named_estimator(name)
    assert type(made) is ESTIMATORS[name]
    assert made.name.partition(":")[0] == name
    assert named_estimator(made.name) == made
    assert hash(named_estimator(made.name)) == hash(made)
    assert named_estimator(made) is made


def test_options() -> None:
    assert named_estimator("percentile:99.9") == Percentile(99.9)
    assert named_estimator(" percentile:50 ") == Percentile(50.0)
    assert named_estimator("percentile").name == "percentile:99.99"
    assert named_estimator("percentile:99.9").name == "percentile:99.9"
    assert named_estimator("percentile:99.99999").name == "percentile:99.99999"
    assert named_estimator("percentile:99.9") != named_estimator("percentile:99.99")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("max_rang", "Did you mean 'max_range'"),
        ("", "unknown estimator ''.*known: avg_range"),
        ("percentile:", "must be numbers"),
        ("percentile:many", "must be numbers"),
        ("percentile:1,2", "has 2 options; percentile takes percent"),
        ("percentile:0", "at most 100"),
        ("percentile:nan", "at most 100"),
        ("mse:3", "has 1 options; mse takes none"),
        (3, "3 is not an estimator"),
        (Mse, "is not an estimator"),
    ],
)
def test_refusals(spec: object, says: str) -> None:
    with pytest.raises(HagoError, match=says):
        named_estimator(spec)  # type: ignore[arg-type]
