"""Block reconstruction: what is cut, what is trained, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_up.random_graphs import random_graph, random_inputs
from networks import ResNet, Uneven, images, randomized
from products import whole
from torch import Tensor

import hago
from hago.arithmetic.types import Edge
from hago.errors import HagoError
from hago.graph import Graph, compute_real, run_real
from hago.plan import Plan, feasibility
from hago.runtime.exactness import compare_plan_exactly
from hago.search import MeasuredPoint, block_reconstruction, correct, correcting, prepare, sqnr_evaluator
from hago.search.block_journal import BlockJournal
from hago.search.block_reconstruction import (
    Reconstructed,
    blocks_of,
    layers_together,
    reconstruct_blocks,
    reconstructed,
    stored_integers,
    trained_layers,
    trained_thresholds,
)
from hago.search.correcting import correct_in_turns
from hago.search.measured_point import first_point
from hago.search.preparation import QuantizationOptions
from hago.search.safe_bits import safe_bits
from hago.simulation import DifferentiableNodes, Drop, Simulator

DATA = [images(16, 3, 8, 8, seed=n) for n in range(4)]
CHIPS = ("x86_vnni", "vta", "tflite", "cmsis_nn", "int16_accumulator", "cpu_weight_only")
SEEDS = range(24 if whole() else 10)


def plan_of_random_graph(seed: int, chip: str, *, safe: bool = True) -> tuple[Plan, list[Tensor]] | None:
    graph = random_graph(seed)
    inputs = random_inputs(graph, seed, batch=4)
    try:
        prepared = prepare(graph, chip, [tuple(inputs)])
    except HagoError:
        return None  # a chip without one of its operators
    bits = safe_bits(prepared) if safe else feasibility.widest_feasible(prepared.resolver).bits
    return prepared.resolver(bits), list(inputs)


def crossing(graph: Graph, before: set[str], layers: set[str]) -> set[str]:
    """The values of nodes before a cut that nodes behind it read, and that depend on a layer."""
    depends = set[str]()
    for node in graph.computed:
        if node.name in layers or depends.intersection(node.inputs):
            depends.add(node.name)
    return {n for node in graph.computed if node.name not in before for n in node.inputs if n in before & depends}


# ---------------------------------------------------------------- blocks
def test_blocks_are_cut_where_one_value_passes_and_give_the_network() -> None:
    cuts = 0
    for seed in range(60):
        graph = random_graph(seed)
        inputs = random_inputs(graph, seed, batch=2)
        layers = {n.name for n in graph.computed if n.op in ("conv1d", "conv2d", "linear")}
        if not layers:
            continue
        blocks = blocks_of(graph, layers, together=1)
        assert [n for block in blocks for n in block.nodes] == list(graph.computed)
        values: dict[str, Any] = dict(zip(graph.inputs, inputs, strict=True))
        before = set[str]()
        for block in blocks:
            assert block.layers and set(block.layers) <= layers
            assert len(crossing(graph, before, layers)) <= 1
            computed = {name: values[name] for name in block.reads}
            for node in block.nodes:
                read = [computed[n] if n in computed else graph.consts[n] for n in node.inputs]
                computed[node.name] = compute_real(node, read)
            before |= {node.name for node in block.nodes}
            values |= computed
        for name, expected in zip(graph.outputs, run_real(graph, inputs), strict=True):
            assert torch.equal(values[name], expected)
        cuts += len(blocks) - 1
    assert cuts > 5, cuts


def test_residual_blocks_stay_whole_and_chains_are_joined() -> None:
    graph = hago.from_torch(randomized(ResNet((4, 8), blocks=1)), images(1, 3, 32, 32))
    layers = {n.name for n in graph.computed if n.op in ("conv2d", "linear")}
    blocks = blocks_of(graph, layers, layers_together(layers))
    assert [sorted(block.layers) for block in blocks] == [
        ["conv1", "stages.0.0.conv1", "stages.0.0.conv2"],
        ["stages.1.0.conv1", "stages.1.0.conv2", "stages.1.0.downsample.0"],
        ["fc"],
    ]
    alone = blocks_of(graph, layers, together=1)
    assert [len(block.layers) for block in alone] == [1, 2, 3, 1]


def test_the_second_time_blocks_are_cut_elsewhere_and_never_hold_all_layers() -> None:
    for count in (4, 8, 19, 30):
        chain = torch.nn.Sequential(*(torch.nn.Conv2d(2, 2, 1) for _ in range(count))).eval()
        graph = hago.from_torch(chain, images(1, 2, 4, 4))
        layers = {n.name for n in graph.computed}
        together = layers_together(layers)
        first, second = block_reconstruction._passes(graph, layers)
        ends = [{block.ends[0] for block in blocks[:-1]} for blocks in (first, second)]
        assert ends[0] and ends[1] and not ends[0] & ends[1]
        assert all(len(block.layers) <= together < count for block in (*first, *second))


# ---------------------------------------------------------------- the simulation with gradients
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("fused", [True, False])
def test_rounded_nodes_with_gradients_are_those_of_the_simulator(chip: str, fused: bool) -> None:
    compared = 0
    for seed in SEEDS:
        made = plan_of_random_graph(seed, chip, safe=False)  # accumulators overflow
        if made is None:
            continue
        plan, inputs = made
        graph = plan.graph
        live = {
            Edge(name, slot): c.to(torch.float64).requires_grad_()
            for name, node in plan.nodes.items()
            for slot, c in node.consts.items()
        }
        ends = graph.outputs if fused else tuple(graph.by_name)
        nodes = DifferentiableNodes(plan, ends)
        simulator, expected = Simulator(plan), dict[str, Any]()
        simulator.run(inputs, on_value=lambda node, value, expected=expected: expected.update({node.name: value}))
        given = nodes.run(graph.computed, simulator.begin(inputs), live)
        for name in ends:
            if name in given:
                assert torch.equal(given[name].detach().double(), expected[name].double()), (seed, name)
                compared += 1
    assert compared > 10


def test_gradients_reach_weights_and_dropped_values_are_not_rounded() -> None:
    prepared = prepare(Uneven().eval(), "x86_vnni", DATA, QuantizationOptions(fix_bits={"*": 4}))
    plan = prepared.resolver(safe_bits(prepared))
    nodes, layers = DifferentiableNodes(plan, plan.graph.outputs), trained_layers(plan)
    live = {
        e: plan.nodes[e.dst].consts[e.slot].to(torch.float64).requires_grad_() for of in layers.values() for e in of
    }
    drop = Drop(torch.Generator().manual_seed(0))
    given = [
        nodes.run(plan.graph.computed, {"x": DATA[0]}, live, drop=d)[plan.graph.outputs[0]] for d in (None, drop, drop)
    ]
    assert not torch.equal(given[0], given[1]) and not torch.equal(given[1], given[2])
    given[1].square().sum().backward()
    assert len(live) == 8 and all(x.grad is not None and bool(x.grad.any()) for x in live.values())
    half = float(drop.like(torch.empty(1000, 100)).mean())
    assert 0.49 < half < 0.51


@pytest.mark.parametrize("chip", ["tflite", "x86_vnni"])
def test_tables_read_the_nearest_integer_in_their_range(chip: str) -> None:
    """Values that are not rounded, or that a factor brings out of the range."""
    seen = 0
    for seed in range(60 if whole() else 30):
        graph = random_graph(seed)
        try:
            prepared = prepare(graph, chip, [tuple(random_inputs(graph, seed))])
        except HagoError:
            continue  # a chip without one of its operators
        bits = {key: group.choices[-1] for key, group in prepared.space.groups.items()}
        point = feasibility.nearest_feasible(prepared.resolver, bits)
        assert point is not None
        plan = point.plan
        tables = {n: p for n, p in plan.nodes.items() if p.table is not None}
        large = dict(zip(graph.inputs, random_inputs(graph, seed, batch=4, size=30.0), strict=True))
        nodes, drop = DifferentiableNodes(plan, tuple(graph.by_name)), Drop(torch.Generator().manual_seed(seed))
        factors = {Edge(name, 0): torch.tensor(1.5, dtype=torch.float64) for name in tables}
        values = nodes.run(graph.computed, large, {}, drop=drop, factors=factors)
        for name, node_plan in tables.items():
            assert node_plan.table is not None
            assert bool(torch.isin(values[name].double(), node_plan.table.double()).all()), (seed, name)
            seen += 1
    assert seen > 10


# ---------------------------------------------------------------- reconstruction
@pytest.mark.parametrize("chip", ["x86_vnni", "vta", "int16_accumulator", "cpu_weight_only"])
def test_reconstructed_blocks_run_in_integers_as_simulated(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reconstruction._Reconstruction, "_error_aside", lambda *_: 0.0)  # all are kept
    monkeypatch.setattr(block_reconstruction, "WEIGHT_RATE", 4.0)  # weights leave their range
    monkeypatch.setattr(block_reconstruction, "MOST_TRAINED", 1 << 9)  # thresholds of 8 bits, too
    changed = learned = 0
    for seed in range(8):
        made = plan_of_random_graph(seed, chip)
        if made is None:
            continue
        plan, inputs = made
        found, again = (reconstruct_blocks(plan, inputs, steps=4) for _ in range(2))
        assert found.values.keys() == again.values.keys() and found.factors == again.factors
        assert all(torch.equal(found.values[n], again.values[n]) for n in found.values)
        graph = plan.graph
        prepared = prepare(graph, chip, [tuple(inputs)])
        bits = safe_bits(prepared)
        moved = reconstructed(prepared, bits, found).resolver(bits)
        for key, factor in found.factors.items():
            for before, after in zip(plan.thresholds[key], moved.thresholds[key], strict=True):
                assert torch.equal(after, before * factor)
        for name, value in found.values.items():
            (edge,) = graph.out_edges[name]
            target, after = stored_integers(moved, edge)
            scale = target.spread_over(after.shape).scale
            whole = value / (scale.flatten() if edge.slot == 2 else scale)
            zero = target.spread_over(after.shape).zero_point
            assert float((after - whole.clamp(target.qmin - zero, target.qmax - zero)).abs().max()) <= 0.5
            if edge.slot == 1:  # weights keep their scales, and so the integers that were trained
                assert torch.equal(after.to(torch.float64), whole.round())
            stored = after + zero
            assert target.qmin <= int(stored.min()) and int(stored.max()) <= target.qmax
        result = compare_plan_exactly(moved, random_inputs(graph, seed + 1))
        assert result.same, (seed, result)
        changed, learned = changed + bool(found), learned + len(found.factors)
    assert changed > 3
    assert (learned > 3) == (chip in ("x86_vnni", "int16_accumulator")), learned  # vta has powers of two


def test_factors_of_thresholds_compute_what_the_plan_with_these_thresholds_does() -> None:
    prepared = prepare(Uneven().eval(), "x86_vnni", DATA, QuantizationOptions(fix_bits={"*": 4}))
    bits = safe_bits(prepared)
    plan = prepared.resolver(bits)
    layers, graph = trained_layers(plan), plan.graph
    edges = list(trained_thresholds(plan, layers))
    assert len(edges) > 2
    nodes = block_reconstruction._Reconstruction(plan, [DATA[0]], 1, 0).nodes
    values = {}
    for edge in (e for of in layers.values() for e in of):
        target, whole = stored_integers(plan, edge)
        values[graph.source(edge)] = whole * (target.scale.flatten() if edge.slot == 2 else target.scale)

    def outputs(factors: dict[Edge, Tensor]) -> Tensor:
        given: Tensor = nodes.run(graph.computed, {"x": DATA[0]}, factors=factors)[graph.outputs[0]]
        return nodes.real(graph.outputs[0], given).detach()

    plain, expected = outputs({}), []
    assert torch.equal(plain, Simulator(plan).run([DATA[0]])[0])
    ones = {e: torch.ones((), dtype=torch.float64) for e in edges}
    assert torch.equal(outputs(ones), plain)
    for factor in (0.8, 1.25):
        found = Reconstructed(values, {str(e): factor for e in edges})
        (expected,) = Simulator(reconstructed(prepared, bits, found).resolver(bits)).run([DATA[0]])
        ours = outputs({e: torch.tensor(factor, dtype=torch.float64) for e in edges})
        error, change = ((ours - other).square().mean() for other in (expected, plain))
        assert error < 1e-3 * change, (error, change)  # biases are rounded in another unit


def test_the_gradient_of_a_factor_is_that_of_a_learned_step() -> None:
    """LSQ: the rounding error where a value is inside its range, and the end of the range outside."""
    prepared = prepare(Uneven().eval(), "x86_vnni", DATA, QuantizationOptions(fix_bits={"*": 4}))
    plan = prepared.resolver(safe_bits(prepared))
    (edge, (source, target)), *_ = trained_thresholds(plan, trained_layers(plan)).items()
    node, simq = plan.graph[edge.dst], plan.nodes[edge.dst].simqs[0]
    assert simq is not None and simq.source is None and source == "x"
    x = torch.linspace(-3.0, 3.0, 3 * 8 * 8).reshape(1, 3, 8, 8) * float(target.scale) * 8
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    nodes = DifferentiableNodes(plan, plan.graph.by_name)
    read = nodes._quantized(simq, x, False, None, factor)
    read.sum().backward()
    low, high = target.qmin - int(target.zero_point), target.qmax - int(target.zero_point)
    steps = x.double() / target.scale
    inside = (steps > low - 1) & (steps < high + 1)
    expected = torch.where(inside, read.detach().double() - steps, read.detach().double()).sum()
    assert node.op == "conv2d" and factor.grad is not None
    assert abs(float(factor.grad - expected)) < 1e-3 * abs(float(expected))


def test_thresholds_that_are_trained_help_where_activations_have_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = images(128, 3, 8, 8, seed=77)
    with torch.no_grad():
        expected = Uneven().eval()(fresh)
    given = prepare(Uneven().eval(), "x86_vnni", DATA, QuantizationOptions(fix_bits={"*": 4})).resolver
    errors, moved = [], []
    for most in (block_reconstruction.MOST_TRAINED, 0):
        monkeypatch.setattr(block_reconstruction, "MOST_TRAINED", most)
        made = hago.quantize(Uneven().eval(), "x86_vnni", DATA, corrections="reconstruction:200", fix_bits={"*": 4})
        errors.append(float((made.simulate()(fresh) - expected).square().mean()))
        thresholds = given(made.strategy.bits).thresholds
        moved.append([k for k in thresholds if not torch.equal(made.plan.thresholds[k][1], thresholds[k][1])])
    assert errors[0] < 0.8 * errors[1], errors
    assert moved[0] and all(key.endswith(":0") for key in moved[0]) and not moved[1]


def test_reconstruction_helps_is_stored_and_replays(tmp_path: Path) -> None:
    fresh = images(128, 3, 8, 8, seed=77)
    with torch.no_grad():
        expected = Uneven().eval()(fresh)
    without, made = (
        hago.quantize(Uneven().eval(), "x86_vnni", DATA, corrections=c, fix_bits={"*": 4})
        for c in ("none", ["reconstruction:200"])
    )
    errors = [float((q.simulate()(fresh) - expected).square().mean()) for q in (without, made)]
    assert errors[1] < 0.5 * errors[0]
    assert made.strategy.made_by["corrections"] == ["reconstruction:200"]
    made.strategy.save(tmp_path / "s.json")
    again = hago.create_quantizer(Uneven().eval(), "x86_vnni", tmp_path / "s.json")
    assert torch.equal(again.realize()(fresh), made.simulate()(fresh))
    assert hago.replay(Uneven().eval(), "x86_vnni", tmp_path / "s.json", DATA).same


def test_a_block_that_is_worse_on_samples_that_did_not_train_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(Uneven().eval(), "x86_vnni", DATA, QuantizationOptions(fix_bits={"*": 4}))
    plan = prepared.resolver(safe_bits(prepared))
    train = block_reconstruction._Reconstruction._train

    def harmful(self: Any, block: Any, *args: Any) -> None:
        train(self, block, *args)
        with torch.no_grad():
            for tensor in self._tensors(block):
                tensor.add_(1e4 if tensor.ndim else 3.0)

    inputs = [torch.cat(DATA)]
    assert reconstruct_blocks(plan, inputs, steps=100)
    monkeypatch.setattr(block_reconstruction._Reconstruction, "_train", harmful)
    assert not reconstruct_blocks(plan, inputs, steps=1)


def a_point(names: list[str]) -> tuple[MeasuredPoint, Any]:
    prepared = prepare(Uneven().eval(), "x86_vnni", DATA, QuantizationOptions(fix_bits={"*": 4}))
    evaluator = sqnr_evaluator(prepared)
    return first_point(correct(prepared, names, evaluator=evaluator), evaluator), evaluator


def test_what_does_not_help_on_the_samples_kept_aside_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    point, evaluator = a_point(["reconstruction"])
    kept = correct_in_turns(point, evaluator, 1)
    seen = 48

    def aside(of: MeasuredPoint) -> float:
        return float(of.measured.contributions["sqnr"][seen:, 1].mean())

    assert aside(kept) != aside(point)

    def harmful(plan: Plan, inputs: list[Tensor], **how: Any) -> Reconstructed:
        assert len(inputs[0]) == seen  # a quarter of 64 is left
        return Reconstructed({name: 2.0 * value.double() for name, value in plan.graph.consts.items()}, {})

    monkeypatch.setattr(correcting, "reconstruct_blocks", harmful)
    (made,) = correct_in_turns(point, evaluator, 1).prepared.passes[len(point.prepared.passes) :]
    assert made.names == ("reconstruction",) and made.why_not == "no gain"


def test_reconstruction_is_made_only_if_named_and_takes_steps() -> None:
    assert "reconstruction" not in correcting.wanted_corrections(None)
    assert correcting.wanted_corrections(["reconstruction", "bias"]) == ("bias", "reconstruction")
    assert correcting.wanted_corrections("reconstruction:7") == ("reconstruction:7",)
    for wrong in ("reconstruction:", "reconstruction:0", "reconstruction:many", "bias:3"):
        with pytest.raises(HagoError, match=wrong):
            correcting.wanted_corrections(wrong)


def test_a_search_reconstructs_its_best_and_an_interrupt_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"progress": False, "searcher": "greedy", "fix_bits": {"*": 4}, "budget": 2}
    options |= {"corrections": "reconstruction:30", "save": tmp_path / "s.json"}
    strategy, score = hago.search_quantize_strategy(Uneven().eval(), "x86_vnni", DATA, **options)
    assert strategy.corrections.offsets
    assert hago.evaluate_strategy(Uneven().eval(), "x86_vnni", strategy, DATA).value == score
    (tmp_path / "s.json").unlink()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(correcting, "reconstruct_blocks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hago.search_quantize_strategy(Uneven().eval(), "x86_vnni", DATA, **options)
    assert (tmp_path / "s.json").exists()


# ---------------------------------------------------------------- interrupts
class Stopped(Exception):
    """What interrupts a reconstruction."""


def few_bits_plan() -> tuple[Plan, list[Tensor]]:
    """A network of several blocks with 4 bits, and the samples to train it on."""
    data = [images(16, 3, 8, 8, seed=n) for n in range(3)]
    prepared = prepare(randomized(ResNet((4, 8), blocks=2)), "x86_vnni", data).with_most_bits(4)
    return prepared.resolver(safe_bits(prepared)), [torch.cat(data)]


def stopping_after(blocks: int) -> Any:
    """A report that raises when so many blocks are trained."""
    said: list[str] = []

    def report(step: str) -> None:
        said.append(step)
        if len(said) > blocks:
            raise Stopped

    return report


def equal_results(a: Reconstructed, b: Reconstructed) -> bool:
    same = a.factors == b.factors and a.values.keys() == b.values.keys()
    return same and all(torch.equal(value, b.values[name]) for name, value in a.values.items())


def test_an_interrupted_reconstruction_goes_on_to_the_same_result(tmp_path: Path) -> None:
    plan, inputs = few_bits_plan()
    path = tmp_path / "log.blocks"
    whole = reconstruct_blocks(plan, inputs, steps=6)
    assert whole
    trained: list[str] = []
    for blocks in (1, 2, 4):
        with pytest.raises(Stopped):
            reconstruct_blocks(plan, inputs, steps=6, report=stopping_after(blocks), journal=path)
        assert path.exists()
        assert len(BlockJournal.read(path, plan.key, plan.graph.correction_hash, 6, 0, *inputs).blocks) == blocks
    again = reconstruct_blocks(plan, inputs, steps=6, report=trained.append, journal=path)
    assert equal_results(again, whole) and not path.exists()


def test_what_is_of_another_reconstruction_or_damaged_is_not_used(tmp_path: Path) -> None:
    plan, inputs = few_bits_plan()
    path = tmp_path / "log.blocks"
    whole = reconstruct_blocks(plan, inputs, steps=6)
    with pytest.raises(Stopped):
        reconstruct_blocks(plan, inputs, steps=5, report=stopping_after(2), journal=path)
    assert equal_results(reconstruct_blocks(plan, inputs, steps=6, journal=path), whole)
    with pytest.raises(Stopped):
        reconstruct_blocks(plan, inputs, steps=6, report=stopping_after(2), journal=path)
    content = path.read_bytes()
    for damaged in (b"", b"text", content[:-9], content[:200] + b"x" + content[201:]):
        path.write_bytes(damaged)
        assert equal_results(reconstruct_blocks(plan, inputs, steps=6, journal=path), whole)
        assert not path.exists()


def test_a_search_that_is_stopped_in_its_reconstruction_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = randomized(ResNet((4, 8), blocks=2)), [images(16, 3, 8, 8, seed=n) for n in range(3)]
    options: dict[str, Any] = {"fix_bits": {"*": 4}, "budget": 1, "progress": False}
    options["corrections"] = ["rounding", "reconstruction:4"]
    train, trained, most = block_reconstruction._Reconstruction._train, list[str](), 1000

    def counted(self: Any, block: Any, *rest: Any) -> None:
        if len(trained) == most:
            raise Stopped
        trained.append(block.layers[0])
        train(self, block, *rest)

    monkeypatch.setattr(block_reconstruction._Reconstruction, "_train", counted)
    whole, _ = hago.search_quantize_strategy(model, "x86_vnni", data, log=tmp_path / "whole", **options)
    once = list(trained)
    trained.clear()
    most = 2
    with pytest.raises(Stopped):
        hago.search_quantize_strategy(model, "x86_vnni", data, log=tmp_path / "log", **options)
    assert (tmp_path / "log.blocks").exists()
    most = 1000
    strategy, _ = hago.search_quantize_strategy(model, "x86_vnni", data, log=tmp_path / "log", **options)
    assert strategy.corrections == whole.corrections and strategy.thresholds == whole.thresholds
    assert len(once) > 2 and trained == once  # no block twice
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "whole"]
