"""Inputs of a softmax far below the largest of their row: their distance does not count, and logs say so."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hago
from hago.arithmetic.equality import equal
from hago.calibration import SOFTMAX_SPAN, collect
from hago.data import Batches
from hago.errors import LogError
from hago.search.session import SearchOptions, run_search

SHAPE = (2, 5, 6)
DATA = [
    (
        torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(seed)),
        (torch.rand(8, 1, 1, SHAPE[2], generator=torch.Generator().manual_seed(seed + 9)) < 0.3).float(),
    )
    for seed in range(4)
]


class Masked(nn.Module):
    """Scores with a mask that is far below them, and their softmax, times values.

    Args:
        low: what the mask adds.
        reshapes: whether the sum is reshaped before the softmax.
        exposed: whether the sum is an output, too.
    """

    def __init__(self, low: float, *, reshapes: bool = False, exposed: bool = False) -> None:
        super().__init__()
        self.low, self.reshapes, self.exposed = low, reshapes, exposed
        self.query, self.out = nn.Linear(SHAPE[2], SHAPE[2]), nn.Linear(SHAPE[2], 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        masked = self.query(x) + mask * self.low
        shaped = masked.flatten(1, 2) if self.reshapes else masked
        out: Tensor = self.out(torch.softmax(shaped, -1))
        return (out, masked) if self.exposed else out


def masked(low: float, **how: bool) -> Masked:
    torch.manual_seed(0)
    return Masked(low, **how).eval()


def decibels(network: Masked, chip: str) -> float:
    strategy = hago.quantize(network, chip, DATA, corrections="none").strategy
    return float(hago.evaluate_strategy(network, chip, strategy, DATA).results["sqnr"])


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("reshapes", [False, True])
@pytest.mark.parametrize("chip", ["tflite", "cmsis_nn", "x86_vnni", "vta", "onnxruntime_cpu"])
def test_how_low_a_mask_lies_changes_hardly_anything(chip: str, reshapes: bool) -> None:
    mild, *low = (decibels(masked(-low, reshapes=reshapes), chip) for low in (20.0, 1e4, 1e9, 3e38))
    assert all(value > mild - 3.0 for value in low), (mild, low)


def test_it_does_where_all_values_count(monkeypatch: pytest.MonkeyPatch) -> None:
    mild = decibels(masked(-20.0), "tflite")
    monkeypatch.setattr("hago.search.preparation.collect", lambda *args: collect(*args[:4], softmax_span=None))
    assert decibels(masked(-1e4), "tflite") < mild - 10.0


@pytest.mark.parametrize("how", [{}, {"reshapes": True}, {"exposed": True}])
def test_what_counts_is_near_the_largest_of_its_row(how: dict[str, bool]) -> None:
    graph = hago.from_torch(masked(-1e4, **how), DATA[0])
    batches = Batches(DATA, graph.inputs)
    (name,) = (node.name for node in graph if node.op == "add")
    found, plain = (collect(graph, batches, [name], softmax_span=span) for span in (SOFTMAX_SPAN, None))
    exposed = bool(how.get("exposed"))
    assert plain.cut == frozenset() and found.cut == (frozenset() if exposed else {name})
    assert found.ranges == plain.ranges and found.peaks[name] > 9e3
    low, high = found.counted_ranges[name]
    assert (low < -9e3) == exposed and high == plain.ranges[name][1]
    assert exposed or low > -SOFTMAX_SPAN - 10.0


def test_values_that_are_not_finite_are_refused_as_before() -> None:
    with pytest.raises(hago.HagoError, match="finite"):
        hago.quantize(masked(-math.inf), "tflite", [(x, torch.ones_like(m)) for x, m in DATA])


def begun_with(span: float | None, path: Path, low: float = -1e4) -> bytes:
    run_search(masked(low), "tflite", DATA, SearchOptions.of(progress=False, log=path, softmax_span=span))
    return path.read_bytes()


def test_logs_that_state_no_span_are_replayed_and_continued_without(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    content = begun_with(None, path)
    assert b"softmax_span" not in content
    assert hago.replay(masked(-1e4), "tflite", path, DATA).same
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    run_search(masked(-1e4), "tflite", DATA, SearchOptions.of(progress=False, log=path))
    trials = [
        [{**json.loads(line), "time": None} for line in text.splitlines()[1:]] for text in (content, path.read_bytes())
    ]
    assert trials[0] == trials[1]


def test_a_new_log_states_it_where_it_changed_something(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    header = json.loads(begun_with(SOFTMAX_SPAN, path).splitlines()[0])
    assert header["settings"]["softmax_span"] == SOFTMAX_SPAN
    assert hago.replay(masked(-1e4), "tflite", path, DATA).same
    other = begun_with(SOFTMAX_SPAN, tmp_path / "other.jsonl", low=-1.0)
    assert b"softmax_span" not in other


@pytest.mark.parametrize("span", ["far", True, 0, -1.0])
def test_other_values_are_refused(span: object, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    header, *trials = begun_with(SOFTMAX_SPAN, path).splitlines(keepends=True)
    edited = json.loads(header)
    edited["settings"]["softmax_span"] = span
    path.write_bytes(json.dumps(edited, sort_keys=True).encode() + b"\n" + b"".join(trials))
    with pytest.raises(LogError, match="edited"):
        hago.replay(masked(-1e4), "tflite", path, DATA)


PADDED = [(x[:, 0], mask[:, 0, 0, :5].bool() & (torch.arange(5) > 0)) for x, mask in DATA]  # (8, 5, 6), (8, 5)


class Attention(nn.Module):
    """Causal attention that leaves padding out.

    Args:
        kind: how the mask is applied.
        low: what masked scores become, or what is added to them.
    """

    def __init__(self, kind: str, low: float) -> None:
        super().__init__()
        self.kind, self.low, self.query = kind, low, nn.Linear(SHAPE[2], SHAPE[2])
        self.attention = nn.MultiheadAttention(SHAPE[2], 2, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        query, later = self.query(x), torch.ones(5, 5, dtype=torch.bool).triu(1)
        scores = query @ query.transpose(1, 2)
        causal = torch.zeros(5, 5).masked_fill(later, self.low)
        padded = torch.zeros(padding.shape).masked_fill(padding, self.low)
        if self.kind == "filled":
            masked = scores.masked_fill(later, self.low).masked_fill(padding[:, None], self.low)
        elif self.kind == "chosen":
            masked = torch.where(padding[:, None] | later, self.low, scores)
        elif self.kind == "added in turn":
            masked = scores + causal + padded[:, None]
        elif self.kind == "added together":
            masked = scores + (causal + padded[:, None])
        elif self.kind == "fused":
            return nn.functional.scaled_dot_product_attention(query, query, query, causal + padded[:, None])
        else:
            with_weights = self.kind == "layer with weights"
            out: Tensor = self.attention(query, query, query, padded, with_weights, causal)[0]
            return out
        return masked.softmax(-1) @ query


@pytest.mark.some_cases(7)
@pytest.mark.parametrize("chip", ["tflite", "x86_vnni", "vta"])
@pytest.mark.parametrize(
    "kind", ["filled", "chosen", "added in turn", "added together", "fused", "layer", "layer with weights"]
)
def test_masks_may_be_infinite(kind: str, chip: str) -> None:
    torch.manual_seed(0)
    network = Attention(kind, -math.inf).eval()
    quantizer = hago.quantize(network, chip, PADDED[:3])
    assert float(hago.evaluate_strategy(network, chip, quantizer.strategy, PADDED[3:]).results["sqnr"]) > 15.0
    assert equal(quantizer.simulate()(*PADDED[3]), quantizer.realize()(*PADDED[3]))
    hago.inspect_graph_statistic(network, chip, quantizer.strategy, PADDED[:1])


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("chip", ["tflite", "x86_vnni", "vta", "onnxruntime_cpu", "tflite_int16"])
@pytest.mark.parametrize("lowest", [-1e5, -1e9, torch.finfo(torch.float32).min])
def test_constant_masks_count_as_infinite_ones(lowest: float, chip: str) -> None:
    class Causal(nn.Module):
        def __init__(self, lowest: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
            self.register_buffer("mask", torch.full((5, 5), lowest).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.query(x) @ self.key(x).transpose(1, 2) * 0.35 + self.mask
            out: Tensor = scores.softmax(-1) @ self.value(x)
            return out

    data = torch.randn(64, 5, 8, generator=torch.Generator().manual_seed(1))

    def decibels(lowest: float) -> float:
        model = Causal(lowest).eval()
        quantizer = hago.quantize(model, chip, [data[:32]])
        assert equal(quantizer.simulate()(data), quantizer.realize()(data))
        return float(hago.evaluate_strategy(model, chip, quantizer.strategy, [data[32:]]).results["sqnr"])

    assert decibels(lowest) == decibels(-math.inf) > 20.0


def test_the_range_of_masked_values_is_that_of_the_others() -> None:
    torch.manual_seed(0)
    graph = hago.from_torch(Attention("added together", -math.inf).eval(), PADDED[0])
    found = collect(graph, Batches(PADDED, graph.inputs), [node.name for node in graph if node.op == "add"])
    assert all(map(math.isfinite, (end for ends in found.ranges.values() for end in ends)))


def test_infinite_weights_are_refused_and_long_sums_are_followed() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(SHAPE[2], SHAPE[2])

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(400):
                x = x + 0.001
            return self.query(x).softmax(-1)

    network = Sums().eval()
    hago.quantize(network, "vta", [PADDED[0][0]], corrections="none")
    with torch.no_grad():
        network.query.weight[0, 0] = -math.inf
    with pytest.raises(hago.HagoError, match="finite"):
        hago.quantize(network, "vta", [PADDED[0][0]], corrections="none")
