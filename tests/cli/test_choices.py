"""The names and defaults that help texts show are those of hago."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import pytest

from hago.analysis.comparison import REALIZATIONS
from hago.analysis.speed import BATCH_SIZES, ROUNDS
from hago.calibration import ESTIMATORS
from hago.cli import choices
from hago.cli.arguments import correction
from hago.cost import METRICS
from hago.data import BATCH_SIZE, EXPECTED_DATA, ImageShape
from hago.demo import HARDWARE
from hago.emulation.dorefa import DOREFAS
from hago.errors import HagoError
from hago.export import FORMATS
from hago.qat import LOSSES, TRAINING_SCHEMES, FinetuneOptions
from hago.report import POINTS
from hago.runtime.native import ENGINES
from hago.search.correcting import CORRECTIONS, wanted_corrections
from hago.search.effort import EFFORTS
from hago.search.objective import OBJECTIVES
from hago.searchers import AUTO, SEARCHERS

#: The value of every constant of `hago.cli.choices`.
EXPECTED: dict[str, Any] = {
    "AUTO": AUTO,
    "SEARCHERS": {name: entry.when for name, entry in SEARCHERS.items()},
    "OBJECTIVES": tuple(OBJECTIVES),
    "ESTIMATORS": tuple(ESTIMATORS),
    "DOREFAS": tuple(DOREFAS),
    "METRICS": tuple(METRICS),
    "FLOAT_METRICS": tuple(name for name, metric in METRICS.items() if metric.depends_on_float),
    "BATCH_SIZE": BATCH_SIZE,
    "EXPECTED_DATA": EXPECTED_DATA,
    "NO_MEAN": tuple(ImageShape().mean),
    "UNIT_STD": tuple(ImageShape().std),
    "CORRECTIONS": CORRECTIONS,
    "EFFORTS": tuple(EFFORTS),
    "REALIZATIONS": tuple(REALIZATIONS),
    "BATCH_SIZES": BATCH_SIZES,
    "ROUNDS": ROUNDS,
    "POINTS": POINTS,
    "ENGINES": tuple(ENGINES),
    "LOSSES": tuple(LOSSES),
    "TRAINING_SCHEMES": tuple(TRAINING_SCHEMES),
    "DEMO_HARDWARE": HARDWARE,
    "EXPORT_FORMATS": {
        name: choices.ExportChoices(form.text, {option.name: option.choices for option in form.options})
        for name, form in FORMATS.items()
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_choices_are_those_of_hago(name: str) -> None:
    assert getattr(choices, name) == EXPECTED[name], f"hago/cli/choices.py: {name}"


def test_every_constant_is_compared() -> None:
    assert {name for name in vars(choices) if name.isupper()} == set(EXPECTED)


def test_defaults_of_training() -> None:
    defaults = asdict(choices.TrainingDefaults())
    assert defaults == {name: getattr(FinetuneOptions(), name) for name in defaults}


def test_options_of_formats_have_no_texts_of_their_own() -> None:
    # the command line would show them, if hago/cli/choices.py had a place for them
    assert {option.text for form in FORMATS.values() for option in form.options} == {"default: %(default)s"}


GIVEN = ("none", *CORRECTIONS, *(f"{name}:7" for name in CORRECTIONS), "round", "reconstruction:", "reconstruction:0")


@pytest.mark.parametrize("text", [*GIVEN, "reconstruction:-1", "reconstruction:x", "reconstruction:1.5", ""])
def test_the_command_line_takes_the_corrections_that_python_takes(text: str) -> None:
    try:
        wanted_corrections(text)
    except HagoError:
        with pytest.raises(argparse.ArgumentTypeError):
            correction(text)
    else:
        assert correction(text) == text
