"""A file of another kind than the one that is expected is called by its name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from building import residual_block, seeded

import hago
from hago.errors import HagoError
from hago.hardware import load_hardware
from hago.study.log import read_log

SPECS: Final = Path(__file__).parent.parent / "hardware_specs"
#: By the name of a kind in errors, how a file of it is read.
READERS: Final[Mapping[str, Callable[[Path], Any]]] = {
    "a strategy": hago.Strategy.load,
    "a front of a search": hago.load_front,
    "a search log": read_log,
    "a hardware file": load_hardware,
    "a hago integer model": hago.load_integer_model,
}
OTHERS: Final = [(given, wanted) for given in READERS for wanted in READERS if given not in (wanted, [*READERS][-1])]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each kind but the last."""
    folder = tmp_path_factory.mktemp("kinds")
    paths = {"save": folder / "s.json", "front": folder / "f.json", "log": folder / "l.jsonl"}
    hago.search_quantize_strategy(
        residual_block(),
        "vta",
        [(seeded(8, 3, 8, 8), torch.arange(8) % 5)],
        estimator="max_range",
        searcher="pareto",
        budget=2,
        progress=False,
        corrections="none",
        **paths,
    )
    hardware = shutil.copy(SPECS / "vta.json", folder / "h.json")
    return dict(zip(READERS, [*paths.values(), Path(hardware)], strict=False))


@pytest.mark.parametrize(("given", "wanted"), OTHERS)
def test_a_file_of_another_kind_is_named(given: str, wanted: str, written: Mapping[str, Path]) -> None:
    with pytest.raises(HagoError) as refused:
        READERS[wanted](written[given])
    said = str(refused.value)
    assert said.startswith(str(written[given])) and f"{given}, for " in said and wanted.removeprefix("a ") in said


@pytest.mark.parametrize("kind", [*READERS][:-1])
def test_a_spoilt_file_of_the_kind_has_its_own_error(kind: str, written: Mapping[str, Path], tmp_path: Path) -> None:
    spoilt = tmp_path / written[kind].name
    spoilt.write_text(written[kind].read_text().replace('"version": ', '"version": 9', 1))
    with pytest.raises(HagoError, match="version"):
        READERS[kind](spoilt)


def test_a_cache_of_negative_size_is_refused_before_anything_is_read() -> None:
    with pytest.raises(HagoError, match="cache_bytes -1; expected a number of bytes, 0 or more"):
        hago.search_quantize_strategy("no model", "vta", [], cache_bytes=-1)
