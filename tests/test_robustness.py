"""Bad input, of every kind: each is a HagoError that says where, what, and what to do; no half file stays."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Small, images, randomized
from torch import Tensor, nn

import hago
from hago.errors import DataError, GraphError, HagoError, HardwareError, InfeasibleBits, LogError
from hago.hardware.hardware import Hardware, OpDesc
from hago.plan.strategy import Strategy

CHIP = "x86_vnni"
DATA = [(images(8, 1, 6, 6, seed=i), torch.arange(8) % 3) for i in range(2)]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return randomized(Small())


@pytest.fixture(scope="module")
def strategy(model: nn.Module) -> Strategy:
    return hago.quantize(model, CHIP, DATA).strategy


def refused(call: Callable[[], object], kind: type[HagoError], *says: str) -> None:
    """The call raises exactly this kind of error, whose message holds these words."""
    with pytest.raises(HagoError) as caught:
        call()
    assert type(caught.value) is kind, caught.value
    message = str(caught.value)
    assert all(word in message for word in says), message
    assert len(message) > 25  # where, what, and what to do do not fit less


# ---------------------------------------------------------------- models
class Of(nn.Module):
    """A linear with something before or after it."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.before, self.after, self.fc = before, after, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.fc(self.before(x)))


def same(x: Tensor) -> Tensor:
    return x


def weights(value: float) -> nn.Module:
    broken = randomized(Small())
    with torch.no_grad():
        broken.body.weight[0, 0, 0, 0] = value  # type: ignore[index, union-attr]
    return broken


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(value: float) -> None:
    refused(
        lambda: hago.quantize(weights(value), CHIP, DATA), GraphError, "'body.weight'", "1 NaN or infinite", "check"
    )


def test_a_value_that_becomes_nan_on_the_way() -> None:
    broken = randomized(Of(torch.log, same))
    refused(lambda: hago.quantize(broken, CHIP, [images(4, 5)]), DataError, "'log'", "NaN")


@pytest.mark.parametrize("not_a_model", ["resnet18", None, torch.relu])
def test_what_is_no_model(not_a_model: Any) -> None:
    refused(lambda: hago.quantize(not_a_model, CHIP, DATA), GraphError, type(not_a_model).__name__, "nn.Module")


def test_results_that_are_not_one_row_per_sample() -> None:
    for after in (torch.mean, lambda y: (y, y.t()), lambda y: y.sum(0)):
        made = randomized(Of(same, after))
        refused(lambda made=made: hago.quantize(made, CHIP, [images(4, 5)]), DataError, "sample")


# ---------------------------------------------------------------- data
@pytest.mark.parametrize(
    "data, says",
    [
        ([], ("empty", "at least one batch")),
        ([images(4, 1, 6, 6), images(4, 1, 5, 6)], ("batch 1", "(1, 5, 6)", "(1, 6, 6)")),
        ([images(4, 1, 6, 6), images(4, 1, 6, 6) / 0], ("batch 1", "sample 0", "NaN or infinite")),
        ([(images(4, 1, 6, 6), torch.arange(3))], ("batch 0", "4 samples", "(3,)")),
        ([{"image": images(4, 1, 6, 6), "mask": images(4, 1), "y": [0, 1, 2, 0]}], ("batch 0", "image", "mask", "'x'")),
        (7, ("int", "iterable of batches")),
    ],
)
def test_data(model: nn.Module, data: Any, says: tuple[str, ...]) -> None:
    for call in (hago.quantize, hago.search_quantize_strategy):
        refused(lambda call=call: call(model, CHIP, data), DataError, *says)


def test_data_of_another_shape_or_kind(model: nn.Module) -> None:
    refused(
        lambda: hago.quantize(model, CHIP, [images(4, 3, 6, 6)]), DataError, "shape (4, 3, 6, 6)", "takes (batch, 1, "
    )
    bytes_ = images(4, 1, 6, 6).to(torch.uint8)
    refused(lambda: hago.quantize(model, CHIP, [bytes_]), DataError, "uint8", "unsigned char")


def test_calls_of_the_quantized_model(model: nn.Module) -> None:
    quantizer = hago.quantize(model, CHIP, DATA)
    for made in (quantizer.simulate(), quantizer.realize()):
        for x, says in (
            (images(2, 3, 6, 6), "(2, 3, 6, 6)"),
            (images(2, 1, 6, 6).to(torch.uint8), "uint8"),
            (images(2, 1, 6, 6) * float("nan"), "NaN"),
            ("cat", "got 0"),
        ):
            refused(lambda made=made, x=x: made(x), GraphError, says)


def test_inputs_of_unequal_batches() -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    made = hago.quantize(Sum().eval(), CHIP, [(images(4, 5), images(4, 5, seed=1))]).simulate()
    refused(lambda: made(images(4, 5), images(3, 5)), GraphError, "[3, 4]")


# ---------------------------------------------------------------- names
class Nothing:
    """An estimator that returns nothing."""

    name = "Nothing"

    def __call__(self, statistics: object, grid: object) -> None:
        return None


UNKNOWN: Mapping[str, tuple[dict[str, Any], type[HagoError], tuple[str, ...]]] = {
    "estimator": ({"estimator": "msee"}, HagoError, ("'msee'", "Did you mean 'mse'")),
    "its options": ({"estimator": "percentile:abc"}, HagoError, ("'percentile:abc'", "numbers")),
    "an estimator of another kind": ({"estimator": 3}, HagoError, ("3", "expected one of")),
    "an estimator that gives no range": ({"estimator": Nothing()}, HagoError, ("Nothing", "returned None", "(lo, hi)")),
    "keep_float": ({"keep_float": ["stem.9"]}, HagoError, ("'stem.9'", "matches no name", "Did you mean")),
    "keep_float, not a list": ({"keep_float": "zz"}, HagoError, ("keep_float", "'z")),
    "fix_bits": ({"fix_bits": {"fcc": 8}}, HagoError, ("'fcc'", "matches no name", "Did you mean 'fc")),
    "bits": ({"fix_bits": {"fc": 9}}, InfeasibleBits, ("'fc'", "9 bits", "'fc:0'", "x86_vnni", "[8, 7, 6, 5, 4]")),
    "bits of another kind": ({"fix_bits": {"fc": "8"}}, HagoError, ("'fc'", "of type str", "expected a whole number")),
    "fix_bits, not a mapping": ({"fix_bits": [8]}, HagoError, ("fix_bits", "list")),
}
SEARCH_ONLY: Mapping[str, tuple[dict[str, Any], type[HagoError], tuple[str, ...]]] = {
    "searcher": ({"searcher": "gredy"}, HagoError, ("'gredy'", "Did you mean 'greedy'")),
    "a searcher of another kind": ({"searcher": 3}, HagoError, ("int", "ask and tell")),
    "a function that makes no searcher": ({"searcher": lambda *_: None}, HagoError, ("None", "ask and tell")),
    "objective": ({"objective": "sqrn"}, HagoError, ("'sqrn'", "Did you mean 'sqnr'")),
    "an objective of another kind": ({"objective": 3}, HagoError, ("3", "objective")),
    "budget": ({"budget": "3 parsecs"}, HagoError, ("'3 parsecs'", "200 trials")),
    "a negative budget": ({"budget": -1}, HagoError, ("-1", "positive")),
    "seed": ({"seed": -1}, HagoError, ("-1", "0 or more")),
    "a seed of another kind": ({"seed": "a"}, HagoError, ("'a'", "integer")),
    "an objective that gives NaN": ({"objective": lambda r, o, y: float("nan")}, HagoError, ("nan", "finite")),
    "an objective that gives a text": ({"objective": lambda r, o, y: "good"}, HagoError, ("good", "number")),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_options(model: nn.Module, case: str) -> None:
    options, kind, says = UNKNOWN[case]
    refused(lambda: hago.quantize(model, CHIP, DATA, **options), kind, *says)


@pytest.mark.parametrize("case", [*UNKNOWN, *SEARCH_ONLY])
def test_options_of_a_search(model: nn.Module, case: str, tmp_path: Path) -> None:
    options, kind, says = {**UNKNOWN, **SEARCH_ONLY}[case]
    paths = {"log": tmp_path / "log.jsonl", "save": tmp_path / "best.json"}
    chosen = {"budget": 2, "progress": False, **paths, **options}
    own = pytest.warns(hago.HagoWarning, match="guided by the squared error")
    with own if callable(options.get("objective")) else contextlib.nullcontext():
        refused(lambda: hago.search_quantize_strategy(model, CHIP, DATA, **chosen), kind, *says)
    left = [p.name for p in tmp_path.iterdir()]
    assert left in ([], ["log.jsonl"])  # a log that was begun holds its header
    if left:
        assert "model_hash" in json.loads(paths["log"].read_text())


def test_labels_that_are_not_there(model: nn.Module) -> None:
    bare = [x for x, _ in DATA]
    refused(
        lambda: hago.search_quantize_strategy(model, CHIP, bare, objective="accuracy", progress=False),
        DataError, "'accuracy' needs labels", "(inputs, labels)",
    )  # fmt: skip


# ---------------------------------------------------------------- hardware
def test_hardware(model: nn.Module, tmp_path: Path) -> None:
    refused(lambda: hago.quantize(model, "x86_vni", DATA), HardwareError, "'x86_vni'", "Did you mean 'x86_vnni'")
    refused(lambda: hago.quantize(model, tmp_path / "no.json", DATA), HardwareError, "no.json", "cannot be read")
    refused(lambda: hago.quantize(model, 42, DATA), HardwareError, "int")  # type: ignore[arg-type]
    only = Hardware({"conv2d": [OpDesc("int8", "int32")]}, name="only", other_ops="reject")
    with pytest.raises(HagoError, match="'stem.2'.*relu.*only.*other_ops: float32"):
        hago.quantize(model, only, DATA)


@pytest.mark.parametrize("has_float", [True, False])
def test_what_is_advised_where_an_accumulator_overflows_helps(has_float: bool) -> None:
    floats = [OpDesc("float32", "float32")] if has_float else []
    narrow = Hardware({"linear": [OpDesc("int8", "int8"), *floats]}, name="narrow")
    deep = nn.Linear(256, 3, bias=False).eval()  # 256 products of 7 by 7 at the fewest bits
    with torch.no_grad():
        deep.weight.fill_(0.5)
    ones = [torch.cat([torch.ones(3, 256), torch.full((1, 256), 0.99)])]  # samples that differ
    with pytest.raises(InfeasibleBits, match=r"overflows its accumulator \(int8\).*wider accumulator") as caught:
        hago.quantize(deep, narrow, ones)
    named = re.search(r"keep_float=(\[.*?\])", str(caught.value))
    assert bool(named) == has_float
    if named:
        kept = hago.quantize(deep, narrow, ones, keep_float=ast.literal_eval(named[1]))
        assert kept.strategy.made_by["results"]["sqnr"] > 100
    wide = Hardware({"linear": [OpDesc("int8", "int32")]}, name="wide")
    assert hago.quantize(deep, wide, ones).strategy.made_by["results"]["sqnr"] > 20


# ---------------------------------------------------------------- files
def test_no_half_file_stays(model: nn.Module, tmp_path: Path) -> None:
    nowhere = tmp_path / "no" / "best.json"
    options = {"budget": 1, "progress": False}
    refused(lambda: hago.search_quantize_strategy(model, CHIP, DATA, save=nowhere, **options), LogError, "best.json")
    refused(lambda: hago.search_quantize_strategy(model, CHIP, DATA, log=nowhere, **options), LogError, "best.json")
    folder = tmp_path / "folder.json"
    folder.mkdir()
    refused(lambda: hago.search_quantize_strategy(model, CHIP, DATA, save=folder, **options), LogError, "folder.json")
    bad = tmp_path / "log.jsonl"
    refused(lambda: hago.search_quantize_strategy(model, CHIP, [], log=bad, **options), DataError, "empty")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.json"]
    assert not list(folder.iterdir())
