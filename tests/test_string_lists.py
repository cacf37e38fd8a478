"""An argument that takes several strings takes one as one entry, everywhere in the public API."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import torch
from networks import Small, images, randomized
from torch import nn

import hago
from hago.errors import HagoError, as_strings
from hago.qat.finetuning import FinetuneOptions
from hago.search.goal import GoalOptions
from hago.search.preparation import QuantizationOptions
from hago.search.session import RunOptions, SearchOptions
from hago.study.log import read_log

CHIP = "x86_vnni"
DATA = [(images(8, 1, 6, 6, seed=i), torch.arange(8) % 3) for i in range(2)]
PUBLIC = {name: getattr(hago, name) for name in hago.__all__} | {"training": FinetuneOptions}
OPTIONS = (SearchOptions, QuantizationOptions, GoalOptions, RunOptions)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return randomized(Small())


def lists_strings(annotation: Any) -> bool:
    """Whether an annotation allows a collection of strings or paths."""
    if get_origin(annotation) in (types.UnionType, typing.Union):
        return any(map(lists_strings, get_args(annotation)))
    kind = get_origin(annotation)
    if not (isinstance(kind, type) and issubclass(kind, Iterable)) or kind is dict or "Mapping" in str(kind):
        return False
    return any(part is str or str in get_args(part) for part in get_args(annotation))


def arguments() -> list[tuple[str, str]]:
    found = []
    for name, called in [*PUBLIC.items(), *(("options", kind) for kind in OPTIONS)]:
        if callable(called):
            maker = called.__init__ if inspect.isclass(called) else called
            hints = typing.get_type_hints(maker, vars(inspect.getmodule(called)))
            found += [(name, argument) for argument in hints if argument != "return" and lists_strings(hints[argument])]
    return found


def searched(model: nn.Module, folder: Path, **given: Any) -> Any:
    strategy, _ = hago.search_quantize_strategy(
        model, CHIP, DATA, searcher="random", budget=2, progress=False, log=folder / "log", **given
    )
    header = read_log(folder / "log").header
    assert header is not None
    return strategy.to_json(), header.to_json("")


def hardware(**given: Any) -> Any:
    return replace(hago.create_sample_hardware(), **given).sources, replace(
        hago.create_sample_hardware(), **given
    ).notes


def graph_of(model: nn.Module, argument: str, given: Any) -> Any:
    graph = hago.from_torch(model, (DATA[0][0],))
    made = replace(graph, **{argument: given})
    return f"{made} {sorted(made.untrained)}"


class Attention(nn.Module):
    """A network that is imported in two ways."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def attention_for(argument: str, given: Any) -> str:
    data = (images(2, 1, 4, 4),)
    whole, opened = (str(hago.from_torch(Attention().eval(), data, attention=way)) for way in ("whole", "opened"))
    found = str(hago.from_torch(Attention().eval(), data, **{argument: given}))
    assert found == whole != opened
    return found


def whole_attention() -> str:
    """The hash of the network with attention kept whole."""
    return hago.from_torch(Attention().eval(), (images(2, 1, 4, 4),), attention="whole").model_hash


#: What a call makes of a value of one of its arguments, and a string to try.
CASES: dict[str, tuple[str, Callable[[nn.Module, Path, str, Any], Any]]] = {
    "quantize.keep_float": ("fc*", lambda m, _, a, v: hago.quantize(m, CHIP, DATA, **{a: v}).strategy.to_json()),
    "quantize.corrections": ("bias", lambda m, _, a, v: hago.quantize(m, CHIP, DATA, **{a: v}).strategy.to_json()),
    "search_quantize_strategy.corrections": ("bias", lambda m, f, a, v: searched(m, f, **{a: v})),
    "make_report.records": (
        "LOG",
        lambda m, _, a, v: {**hago.make_report(m, CHIP, v, progress=False, remedies=False).to_json(), "at": ""},
    ),
    "explain.keep_float": ("fc*", lambda m, _, a, v: str(hago.explain(m, CHIP, (DATA[0][0],), **{a: v}))),
    "measure_sensitivity.corrections": (
        "none",
        lambda m, _, a, v: hago.measure_sensitivity(m, CHIP, DATA, **{a: v}).to_json(),
    ),
    "measure_sensitivity.keep_float": (
        "fc*",
        lambda m, _, a, v: hago.measure_sensitivity(m, CHIP, DATA, **{a: v}).to_json(),
    ),
    "prepare_qat.keep_float": (
        "fc*",
        lambda m, _, a, v: sorted(hago.prepare_qat(m, CHIP, dataset=DATA, **{a: v}).training_plan.plan.nodes),
    ),
    "search_quantize_strategy.keep_float": ("fc*", lambda m, f, a, v: searched(m, f, **{a: v})),
    "search_quantize_strategy.keep": ("sqnr >= 1 dB", lambda m, f, a, v: searched(m, f, **{a: v})),
    "search_quantize_strategy.budget_cost": ("weight_bytes <= 1 MB", lambda m, f, a, v: searched(m, f, **{a: v})),
    "search_quantize_strategy.reuse": ("REUSED", lambda m, f, a, v: searched(m, f, **{a: v})),
    "Hardware.sources": ("a manual", lambda m, _, a, v: hardware(**{a: v})),
    "Hardware.notes": ("a note", lambda m, _, a, v: hardware(**{a: v})),
    "from_torch.made_for": ("WHOLE", lambda m, _, a, v: attention_for(a, v)),
    "Graph.inputs": ("INPUT", lambda m, _, a, v: graph_of(m, a, v)),
    "Graph.outputs": ("fc", lambda m, _, a, v: graph_of(m, a, v)),
    "Graph.untrained": ("fc.weight", lambda m, _, a, v: graph_of(m, a, v)),
}


def test_every_argument_that_lists_strings_is_tried() -> None:
    found = {f"{name}.{argument}" for name, argument in arguments()}
    # the options are those of the search, and reach it as they are
    assert {case for case in found if not case.startswith(("options", "training"))} == CASES.keys()
    assert {case.replace("options", "search_quantize_strategy") for case in found if case.startswith("options")} <= {
        *CASES
    }


@pytest.mark.parametrize("case", CASES)
def test_a_string_is_one_entry(case: str, model: nn.Module, tmp_path: Path) -> None:
    value, call = CASES[case]
    argument = case.partition(".")[2]
    if value == "INPUT":
        value = hago.from_torch(model, (DATA[0][0],)).inputs[0]
    if value == "WHOLE":
        value = whole_attention()
    if value == "REUSED":
        (tmp_path / "reused").mkdir()
        searched(model, tmp_path / "reused")
        value = str(tmp_path / "reused" / "log")
    if value == "LOG":
        value = str(tmp_path / "log.jsonl")
        hago.search_quantize_strategy(model, CHIP, DATA, log=value, progress=False, budget=2)
    made = []
    for index, given in enumerate((value, [value], (value,))):
        folder = tmp_path / str(index)
        folder.mkdir()
        made.append(json.dumps(call(model, folder, argument, given), sort_keys=True, default=str))
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("pattern", ["4*", "nothing", ["fc", "nothing"], ""])
def test_a_pattern_that_matches_nothing_is_refused(pattern: str | Sequence[str], model: nn.Module) -> None:
    for wrong in ({"keep_float": pattern}, {"fix_bits": dict.fromkeys(as_strings(pattern, ""), 8)}):
        with pytest.raises(HagoError, match="matches no name"):
            hago.quantize(model, CHIP, DATA, **wrong)
        with pytest.raises(HagoError, match="matches no name"):
            hago.explain(model, CHIP, (DATA[0][0],), **wrong)


@pytest.mark.parametrize("wrong", [7, [7], ["fc", None], [["fc"]]])
def test_what_is_no_string_is_refused(wrong: Any, model: nn.Module) -> None:
    said = re.escape("expected a string, or a list of strings")
    for argument in ("keep_float", "keep", "budget_cost"):
        with pytest.raises(HagoError, match=said):
            hago.search_quantize_strategy(model, CHIP, DATA, progress=False, **{argument: wrong})


def test_strings_of_any_collection() -> None:
    some: Collection[Any]
    for some in (["ab", "c"], ("ab", "c"), {"ab": 1, "c": 2}, dict.fromkeys(("ab", "c")).keys()):
        assert as_strings(some, "x") == ("ab", "c")
    assert as_strings("ab", "x") == ("ab",) and as_strings(None, "x") == ()
