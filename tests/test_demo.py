"""The demo: its integer model equals its simulation, and its files can be used afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from digits import few_digits

from hago.demo import CALIBRATION, TRAIN, Demo, DigitNet, load_digits, run_demo, train
from hago.errors import HagoError
from hago.graph.model_source import load_model
from hago.plan.strategy import Strategy
from hago.study.log import read_log

SPECS = ("x86_vnni", "int16_accumulator")
#: Which part of the digits is used, and how many images that leaves to test on.
ONE_OF = 4
TEST = (1797 - TRAIN - CALIBRATION) // ONE_OF


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Demo, list[str]]:
    out, said = tmp_path_factory.mktemp("demo"), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        few_digits(patch, ONE_OF)
        return out, run_demo(out, said.append, hardware=SPECS, budget="3 trials", epochs=2 * ONE_OF), said


def test_the_integer_model_is_the_simulation_on_every_image(made: tuple[Path, Demo, list[str]]) -> None:
    _, demo, _ = made
    assert demo.same and len(demo.results) == len(SPECS)
    for result in demo.results:
        judged = result.report
        assert judged.samples == TEST and judged.compared > judged.samples * 10
        assert judged.figures["simulated"] == judged.figures["integer"]
        assert judged.figures["float"]["agreement"] == 1.0


def test_its_files_can_be_read(made: tuple[Path, Demo, list[str]]) -> None:
    out, demo, _ = made
    for name, result in zip(SPECS, demo.results, strict=True):
        assert (
            result.log == out / "logs" / f"demo-{name}.jsonl" and len(read_log(result.log).trials) == result.trials == 3
        )
        assert Strategy.load(out / "strategies" / f"demo-{name}.json").hardware.name == name
    assert isinstance(load_model("hago.demo:DigitNet", out / "demo" / "weights.pt"), DigitNet)
    with np.load(out / "demo" / "test.npz") as arrays:
        assert arrays["images"].shape == (TEST, 1, 8, 8) and arrays["labels"].shape == (TEST,)


def test_it_reports_its_progress(made: tuple[Path, Demo, list[str]]) -> None:
    _, demo, said = made
    text = "\n".join([*said, str(demo)])
    for expected in (
        "trained a residual network",
        "nodes in integers",
        "searched 3 trials",
        "simulated == integer: all",
    ):
        assert expected in text
    lines = str(demo).splitlines()
    assert len(lines) == 1 + 4 * len(SPECS) and "95 % interval" in lines[0]
    assert json.loads(json.dumps(demo.to_json()))["same"] is True


def test_the_widest_bits_overflow_in_16_bit_accumulators(made: tuple[Path, Demo, list[str]]) -> None:
    _, demo, _ = made
    easy, hard = demo.results
    assert easy.widest_overflows == 0 < hard.widest_overflows
    assert hard.report.figures["simulated"]["sqnr"] > hard.widest["sqnr"]


def test_training_is_deterministic_and_keeps_the_random_state() -> None:
    digits = load_digits()
    before = torch.random.get_rng_state()
    first, second = (train((digits.train[0][:100], digits.train[1][:100]), epochs=1) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before) and not first.training
    assert all(torch.equal(v, second.state_dict()[k]) for k, v in first.state_dict().items())


def test_the_parts_have_no_image_in_common_by_place() -> None:
    digits = load_digits()
    sizes = [len(part[0]) for part in (digits.train, digits.calibration, digits.test)]
    assert sizes == [1000, 200, 597]
    everything = torch.cat([digits.train[0], digits.calibration[0], digits.test[0]]).flatten(1).sum()
    assert float(everything) == pytest.approx(561718 / 16, rel=1e-3)  # all 1797 digits, each once


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(HagoError, match="cannot write to"):
        run_demo(tmp_path / "file", lambda line: None, epochs=1)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(HagoError, match=r"pip install 'hago\[demo\]'"):
        load_digits()
