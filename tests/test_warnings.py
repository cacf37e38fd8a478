"""What hago does instead of what was asked is a warning that says so, and what it advises helps."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Small, images, randomized
from torch import Tensor, nn

import hago
from hago.analysis.stored_run import run_model
from hago.cli import warnings_as_lines
from hago.errors import warn

CHIP = "x86_vnni"
CLASSES = 3
INPUTS = [images(8, 1, 6, 6, seed=i) for i in range(3)]
RIGHT = [(torch.arange(8) + i) % CLASSES for i in range(3)]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    made = randomized(Small())
    assert made(INPUTS[0]).shape == (8, CLASSES)
    return made


# ---------------------------------------------------------------- where a warning points
def test_a_warning_names_the_line_outside_hago() -> None:
    namespace: dict[str, Any] = {"__name__": "hago.somewhere", "warn": warn}
    exec("def inner(): warn('odd')\ndef outer(): inner()", namespace)
    with pytest.warns(hago.HagoWarning, match="odd") as seen:
        namespace["outer"]()
    assert seen[0].filename == __file__


# ---------------------------------------------------------------- labels
def one_hot(labels: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(labels, CLASSES)


#: Labels that are no classes, and what makes them classes, as the warning says it.
WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str, Callable[[Tensor], Tensor]]] = {
    "from one": (lambda y: y + 1, "pass labels - 1", lambda y: y - 1),
    "one-hot": (one_hot, "pass labels.argmax(1)", lambda y: y.argmax(1)),
    "real one-hot": (lambda y: one_hot(y).float(), "pass labels.argmax(1)", lambda y: y.argmax(1)),
    "out of range": (lambda y: y + 100, "expected 0 to 2", lambda y: y - 100),
    "negative": (lambda y: y - 1, "expected 0 to 2", lambda y: y + 1),
    "fractions": (lambda y: y + 0.5, "expected 0 to 2", lambda y: y - 0.5),
    "a column": (lambda y: y[:, None], "expected (8,)", lambda y: y[:, 0]),
}


def quantized(model: nn.Module, data: Any) -> Any:
    return hago.quantize(model, CHIP, data).strategy.made_by["results"]


def searched(model: nn.Module, data: Any) -> Any:
    return hago.search_quantize_strategy(model, CHIP, data, searcher="default", progress=False)[0].made_by["results"]


def evaluated(model: nn.Module, data: Any) -> Any:
    return hago.evaluate_strategy(model, CHIP, strategy(model), data).results


def ran(model: nn.Module, data: Any) -> Any:
    found = run_model(hago.create_quantizer(model, CHIP, strategy(model), (INPUTS[0],)).realize(), data)
    return {} if found.accuracy is None else {"sim_acc": found.accuracy[0]}


def trained(model: nn.Module, data: Any) -> Any:
    return hago.finetune(model, CHIP, strategy(model), data, steps=1, progress=False).after


def strategy(model: nn.Module) -> hago.Strategy:
    return hago.quantize(model, CHIP, INPUTS).strategy


@pytest.mark.some_cases(12)
@pytest.mark.parametrize("call", [quantized, searched, evaluated, ran, trained])
@pytest.mark.parametrize("wrong", WRONG)
def test_labels_that_are_no_classes_are_a_warning_and_the_advice_helps(
    wrong: str, call: Callable[[nn.Module, Any], Any], model: nn.Module
) -> None:
    spoil, advice, mend = WRONG[wrong]
    data = [(x, spoil(y)) for x, y in zip(INPUTS, RIGHT, strict=True)]
    said = re.escape(advice).replace("8", r"\d+")
    with pytest.warns(hago.HagoWarning, match=rf"{said}.*Accuracy is not measured"):
        assert "sim_acc" not in call(model, data)
    assert "sim_acc" in call(model, [(x, mend(y)) for x, y in data])  # a warning would be an error here
    assert "sim_acc" not in call(model, INPUTS)


@pytest.mark.filterwarnings("error")
def test_labels_that_an_objective_of_ones_own_reads_are_nobodys_business(model: nn.Module) -> None:
    data = [(x, torch.randn(8, 3)) for x in INPUTS]

    def own(reference: Any, outputs: Any, labels: Tensor) -> float:
        return float(labels.mean())

    hago.search_quantize_strategy(model, CHIP, data, searcher="default", objective=own, progress=False)


def test_labels_in_some_batches_alone(model: nn.Module) -> None:
    data = [(INPUTS[0], RIGHT[0]), INPUTS[1]]
    with pytest.warns(hago.HagoWarning, match="1 of 2 batches have no labels"):
        assert "sim_acc" not in quantized(model, data)


# ---------------------------------------------------------------- data in another form
#: Values as users have them, of which float32 holds all exactly.
FORMS: dict[str, Callable[[Tensor], Any]] = {
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "numpy": lambda x: x.numpy(),
    "numpy float64": lambda x: x.double().numpy(),
    "numpy float16": lambda x: x.half().numpy(),
    "numpy of a step": lambda x: x.repeat_interleave(2, 3).numpy()[..., ::2],
}
EXACT = [(x * 8).round() / 8 for x in INPUTS]


@pytest.mark.parametrize("form", FORMS)
def test_models_take_what_calibration_takes(form: str, model: nn.Module, tmp_path: Path) -> None:
    made = [FORMS[form](x) for x in EXACT]
    plain = hago.quantize(model, CHIP, EXACT)
    found = hago.quantize(model, CHIP, made)
    assert found.plan.key == plain.plan.key and found.strategy == plain.strategy
    assert str(hago.explain(model, CHIP, (made[0],))) == str(hago.explain(model, CHIP, (EXACT[0],)))
    integer = found.realize()
    integer.save(tmp_path / "model")
    trainable = hago.prepare_qat(model, CHIP, plain.strategy).eval()
    name = found.plan.graph.inputs[0]
    for runs in (integer, found.simulate(), hago.load_integer_model(tmp_path / "model"), trainable):
        for x, given in zip(EXACT, made, strict=True):
            assert runs(given).equal(runs(x)) and runs(**{name: given}).equal(runs(x))
    whole, other = run_model(integer, EXACT), run_model(integer, made)
    assert other.same and all(a.equal(b) for a, b in zip(whole.outputs, other.outputs, strict=True))


@pytest.mark.parametrize("integers", [torch.uint8, torch.int64, torch.bool])
def test_integers_are_no_real_numbers_anywhere(integers: torch.dtype, model: nn.Module) -> None:
    images_ = [(x.abs() * 100).clamp(max=255).to(torch.uint8) for x in INPUTS]
    wrong = [x.to(integers) for x in images_]
    right = [x.float() / 255 for x in images_]
    graph = hago.from_torch(model, (INPUTS[0],))
    found = hago.quantize(graph, CHIP, right)
    integer, said = found.realize(), r"the model takes torch.float32: convert it .*images.float\(\) / 255"
    calls: list[Callable[[Any], Any]] = [
        integer,
        found.simulate(),
        hago.prepare_qat(graph, CHIP, found.strategy),
        lambda x: run_model(integer, [x]),
        lambda x: hago.quantize(graph, CHIP, [x]),
        lambda x: hago.evaluate_strategy(graph, CHIP, found.strategy, [x]),
        lambda x: hago.search_quantize_strategy(graph, CHIP, [x], progress=False),
        lambda x: hago.inspect_graph_statistic(graph, CHIP, found.strategy, [x]),
        lambda x: hago.finetune(graph, CHIP, found.strategy, [x]),
    ]
    for call in calls:
        for x in (wrong[0], wrong[0].numpy()):
            with pytest.raises(hago.HagoError, match=said):
                call(x)
    assert run_model(integer, right).same
    with pytest.raises(hago.HagoError, match="batch 1 has inputs of .*convert all in the same way"):
        hago.quantize(graph, CHIP, [right[0], wrong[1]])


# ---------------------------------------------------------------- operators without a rule
class Unknown(nn.Module):
    """Operators that hago has no rule for, on real values, on indices and on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).cumsum(2)
        y = self.last(y.cumsum(3) + torch.sinc(y))
        return y.flatten(1)[:, torch.arange(3).cumsum(0)]


@pytest.mark.filterwarnings("error")
def test_operators_without_a_rule_are_named_and_a_rule_ends_it() -> None:
    network = Unknown().eval()
    said = r"no rule for 2 x aten.cumsum.default, 1 x aten.sinc.default: these run in float"
    for call in (
        lambda: hago.quantize(network, CHIP, INPUTS),
        lambda: hago.search_quantize_strategy(network, CHIP, INPUTS, searcher="default", progress=False),
        lambda: hago.measure_sensitivity(network, CHIP, INPUTS),
    ):
        with pytest.warns(hago.HagoWarning, match=said) as seen:
            call()
        assert len(seen) == 1 and seen[0].filename == __file__
    assert "2 x aten.cumsum.default: hago has no rule for" in str(hago.explain(network, CHIP, (INPUTS[0],)))


@pytest.mark.filterwarnings("error")
def test_an_operator_is_named_until_it_has_a_rule(model: nn.Module) -> None:
    """As the warning advises: a rule ends it; any rule of hago does, taken away and given back."""
    chip = hago.load_hardware(CHIP)
    without = hago.Hardware(
        **{f.name: getattr(chip, f.name) for f in fields(chip) if f.name not in ("ops", "known_ops")},
        ops={name: descs for name, descs in chip.ops.items() if name != "relu"},
        known_ops={name: rule for name, rule in chip.known_ops.items() if name != "relu"},
    )
    with pytest.warns(hago.HagoWarning, match=r"no rule for \d x aten.relu.default"):
        hago.quantize(model, without, INPUTS)
    hago.quantize(model, chip, INPUTS)


def test_what_a_chip_keeps_in_float_is_no_warning(model: nn.Module) -> None:
    chip = hago.load_hardware(CHIP)
    some = replace(chip, ops={name: descs for name, descs in chip.ops.items() if name in ("conv2d",)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hago.explain(model, some, (INPUTS[0],)).float_nodes
        hago.quantize(model, some, INPUTS, keep_float=["fc"])


# ---------------------------------------------------------------- the command line
def test_on_the_command_line_a_warning_is_one_line_said_once() -> None:
    said: list[str] = []
    with warnings_as_lines(said.append):
        warn("odd")
        warn("odd")
        warn("even")
        with pytest.raises(DeprecationWarning):
            warnings.warn("of others", DeprecationWarning, stacklevel=1)
    assert said == ["warning: odd", "warning: even"]
    with pytest.raises(hago.HagoWarning):
        warn("odd")


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_recurrent_layers_are_named(module: Any) -> None:
    """Their operators give several results; what takes one of these, and the sizes of states, are no operators."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            is_cell = module in (nn.LSTMCell, nn.GRUCell)
            self.layer = module(6, 8) if is_cell else module(6, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.layer(x)
            return found[0] if isinstance(found, tuple) else found

    x = torch.randn(16, 6) if module in (nn.LSTMCell, nn.GRUCell) else torch.randn(16, 5, 6)
    with pytest.warns(hago.HagoWarning, match=r"hago has no rule for 1 x aten\.(lstm|gru)\S*: these run in float"):
        quantizer = hago.quantize(Recurrent().eval(), "x86_vnni", [x])
    assert not quantizer.plan.nodes
