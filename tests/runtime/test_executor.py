"""The fast engine against the reference, bit for bit: random networks, and every kind of layer by itself."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from building import Builder, residual_block, seeded
from chips import Chip
from plans import points, resolver_of
from products import whole
from random_graphs import random_graph, random_inputs
from specs import EVERY
from torch import Tensor

import hago
from hago.arithmetic.equality import count_differing
from hago.errors import HagoError
from hago.graph.graph import Graph
from hago.hardware.hardware import Hardware
from hago.plan.plan import Plan
from hago.runtime.native.executor import Executor, NativeIntegerModel, named_engine
from hago.runtime.native.self_test import NOTHING, ExactKernels, Verdict, exact_kernels
from hago.runtime.native.weights import KernelConstantCache
from hago.runtime.reference import IntegerModel
from runtime.instruction_sets import INSTRUCTION_SETS, kernels_for, library_for


def check(
    plan: Plan,
    inputs: list[Tensor],
    constant_cache: KernelConstantCache | None = None,
    using: ExactKernels | None = None,
) -> Executor:
    """Equal outputs, with the same shapes, dtypes and layout, however a batch is cut, and when a pass is repeated."""
    executor, expected = Executor(plan, constant_cache, using), IntegerModel(plan).run(inputs)
    cut = [Executor(plan, constant_cache, using, cached_bytes=1)] if executor.segments else []
    for each in (executor, *cut):
        for _ in range(3):  # step by step, recorded, repeated
            for fast, exact in zip(each.run(inputs), expected, strict=True):
                assert fast.shape == exact.shape and fast.dtype == exact.dtype and fast.is_contiguous()
                assert count_differing(fast, exact) == 0, executor.explain()
    return executor


def plan_of(graph: Graph, hardware: Hardware, inputs: list[Tensor]) -> Plan:
    resolver = resolver_of(graph, hardware, inputs)
    return resolver(resolver.space.widest())


@pytest.mark.parametrize("seed", range(100, 130))
def test_random_networks(seed: int) -> None:
    rng, graph, constant_cache = random.Random(seed), random_graph(seed), KernelConstantCache()
    data = random_inputs(graph, seed)
    for name in rng.sample(sorted(EVERY), 2):
        resolver = resolver_of(graph, EVERY[name], data, rng.choice(["max_range", "power2_range"]))
        for bits in islice(points(resolver.space, seed), 3):
            check(resolver(bits), random_inputs(graph, seed + 1, batch=rng.choice([1, 3]), size=4.0), constant_cache)


class Recurrent(torch.nn.Module):
    """An LSTM, whose kernels of torch with and without gradients differ in the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = torch.nn.LSTM(4, 10, num_layers=2, batch_first=True), torch.nn.Linear(10, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (_, cells) = self.lstm(x)
        return self.out(y[:, -1]), cells.permute(1, 0, 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_no_pass_of_a_recurrent_layer_takes_another_kernel(mode: Any) -> None:
    torch.manual_seed(0)
    data = [torch.randn(4, 16, 4) for _ in range(2)]
    quantizer = hago.quantize(Recurrent().eval(), "tflite", data)
    simulated, integer = quantizer.simulate()(data[0]), quantizer.realize()
    with mode():
        for _ in range(4):  # step by step, recorded, repeated
            assert all(map(torch.equal, integer(data[0]), simulated))


@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_hardware(name: str) -> None:
    graph, x = residual_block(), seeded(2, 3, 8, 8)
    check(plan_of(graph, EVERY[name], [x]), [seeded(3, 3, 8, 8, seed=5, size=2.0)])


def test_every_plan_runs_without_kernels() -> None:
    graph, x = residual_block(), seeded(2, 3, 8, 8)
    plan = plan_of(graph, EVERY["x86_vnni"], [x])
    executor = Executor(plan, using=NOTHING)
    assert executor.run([x])[0].equal(IntegerModel(plan).run([x])[0])
    assert set(executor.explain().kernels) == {"torch in floats", "reference", "none", "torch on bytes"}


#: With activations of 16 bits.
WORDS = ("tflite_int16", "wide_operands")
CONVS = {
    "dense": ((8, 20, 3), {}),
    "in squares": ((32, 20, 3), {}),
    "few channels": ((3, 70, 3), {"stride": [2, 2]}),
    "pointwise": ((16, 33, 1), {"padding": [0, 0]}),
    "depthwise": ((70, 70, 3), {"groups": 70}),
    "depthwise, whole vectors": ((64, 64, 3), {"groups": 64}),
    "depthwise strided": ((16, 16, 5), {"groups": 16, "stride": [2, 1]}),
    "grouped": ((12, 20, 3), {"groups": 4}),
    "grouped with a multiplier": ((6, 18, 3), {"groups": 6}),
    "dilated": ((8, 8, 3), {"dilation": [2, 3], "padding": [2, 3]}),
    "same": ((5, 6, 3), {"padding": "same"}),
    "valid": ((5, 6, 3), {"padding": "valid"}),
    "same, wider on one side": ((5, 6, 2), {"padding": "same"}),
}


def conv_network(case: str) -> Graph:
    (channels, out, kernel), attrs = CONVS[case]
    b = Builder()
    x = b.input(channels, 9, 7, name="x")
    weight = seeded(out, channels // int(attrs.get("groups", 1)), kernel, kernel, seed=1)
    conv = b.conv2d(x, weight, seeded(out, seed=2), name="conv", **attrs)
    b.conv2d(b.call("relu", conv, name="relu"), seeded(4, out, 1, 1, seed=3), name="next", padding=[0, 0])
    return b.graph()


@pytest.mark.filterwarnings("ignore:Using padding")
@pytest.mark.parametrize("case", CONVS)
@pytest.mark.parametrize("name", ["x86_vnni", "arm_dot", "affine_at_output", "int16_saturates", "int16_wraps", *WORDS])
def test_convolutions(case: str, name: str) -> None:
    channels = CONVS[case][0][0]
    plan = plan_of(conv_network(case), EVERY[name], [seeded(2, channels, 9, 7)])
    executor = check(plan, [seeded(3, channels, 9, 7, seed=7, size=3.0)])
    if exact_kernels().conv.exact and case != "same, wider on one side":
        kernel = executor.explain().rows[0].kernel
        ways = ("", " on tiles", " by Winograd", " in pairs", " in fours")
        assert kernel in ({"native conv of words"} if name in WORDS else {f"native conv{way}" for way in ways})
    laid = seeded(3, channels, 9, 7, seed=8).contiguous(memory_format=torch.channels_last)
    check(plan, [laid])
    check(plan, [laid[:1]])


POOLS = {
    "overlapping": ((3, 64, 3), (3, 2, 1, 1)),
    "side by side": ((8, 24, 1), (2, 2, 0, 1)),
    "rows left out": ((5, 70, 3), (2, 3, 0, 1)),
    "dilated": ((16, 80, 3), (3, 1, 1, 2)),
    "depthwise": ((70, 70, 3), (5, 2, 2, 1)),
    "in squares": ((32, 40, 3), (3, 2, 1, 1)),
}


def pool_network(case: str, height: int, width: int) -> Graph:
    (channels, out, kernel), (window, stride, padding, dilation) = POOLS[case]
    b = Builder()
    groups = channels if case == "depthwise" else 1
    weight = seeded(out, channels // groups, kernel, kernel, seed=1)
    half = [kernel // 2] * 2
    x = b.input(channels, height, width, name="x")
    steps = [1, 1] if case == "in squares" else [2, 1]
    conv = b.conv2d(x, weight, seeded(out, seed=2), name="conv", stride=steps, padding=half, groups=groups)
    size = {"kernel_size": [window] * 2, "stride": [stride] * 2, "padding": [padding] * 2, "dilation": [dilation] * 2}
    pool = b.call("max_pool2d", b.call("relu", conv, name="relu"), name="pool", ceil_mode=False, **size)
    twice = b.conv2d(pool, seeded(out, out, 1, 1, seed=3), name="next", padding=[0, 0])
    b.call("add", twice, pool, name="sum")
    return b.graph()


@pytest.mark.parametrize("case", POOLS)
@pytest.mark.parametrize("name", ["x86_vnni", "arm_dot", "affine_at_output", "int16_wraps", "tflite", "tflite_int16"])
def test_a_convolution_fused_with_a_pooling(case: str, name: str) -> None:
    channels = POOLS[case][0][0]
    plan = plan_of(pool_network(case, 33, 25), EVERY[name], [seeded(2, channels, 33, 25)])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if name == "x86_vnni" else 1)
        executor = check(plan, [seeded(3, channels, 33, 25, seed=7, size=3.0)])
        check(plan, [seeded(1, channels, 33, 25, seed=8)])
    finally:
        torch.set_num_threads(before)
    if exact_kernels().conv.exact:
        assert "in the kernel of conv" in {row.node: row.why for row in executor.explain().rows}["pool"]


@pytest.mark.parametrize("name", ["x86_vnni", "vta", "affine_at_output", "int16_wraps"])
def test_an_average_fused_with_a_sum(name: str) -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 8, 6, name="x"), seeded(20, 3, 3, 3, seed=1), name="conv")
    half = b.conv2d(conv, seeded(20, 20, 1, 1, seed=2), name="half", stride=[2, 2], padding=[0, 0])
    size = {"kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0]}
    pool = b.call("avg_pool2d", conv, **size, ceil_mode=False, count_include_pad=True, divisor_override=None)
    b.conv2d(b.call("add", half, pool), seeded(4, 20, 1, 1, seed=3), name="next")
    check(plan_of(b.graph(), EVERY[name], [seeded(2, 3, 8, 6)]), [seeded(3, 3, 8, 6, seed=7, size=3.0)])


@pytest.mark.parametrize("threads", [2, 3, 7, 50])
@pytest.mark.parametrize("size", [(13,), (6, 5)])
def test_poolings_are_shared_out_between_threads(size: tuple[int, ...], threads: int) -> None:
    """Runs of pixels begin and end anywhere in an image; there are fewer pixels than threads, too."""

    def pooled(op: str, x: str, **more: Any) -> str:
        ones, twos = [1] * len(size), [2] * len(size)
        return b.call(op, x, name=op, kernel_size=twos, stride=ones, padding=ones, ceil_mode=False, **more)

    def convolved(x: str, name: str) -> str:
        ones, weight = [1] * len(size), b.const(seeded(5, 5, *[1] * len(size), seed=1))
        how = {"stride": ones, "padding": [0] * len(size), "dilation": ones, "groups": 1}
        return b.call(f"conv{len(size)}d", x, weight, b.const(seeded(5, seed=2)), name=name, **how)

    b, dims = Builder(), len(size)
    most = pooled(f"max_pool{dims}d", convolved(b.input(5, *size, name="x"), "first"), dilation=[1] * dims)
    averaging = {"count_include_pad": True} | ({"divisor_override": None} if dims == 2 else {})
    convolved(pooled(f"avg_pool{dims}d", convolved(most, "second"), **averaging), "last")
    plan = plan_of(b.graph(), EVERY["vta"], [seeded(2, 5, *size)])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        executor = check(plan, [seeded(3, 5, *size, seed=7, size=3.0)])
    finally:
        torch.set_num_threads(before)
    if exact_kernels().passes.exact:
        assert [row.kernel for row in executor.explain().rows if "pool" in row.node] == [
            "native max pool",
            "native sum pool",
        ]


#: By name: op, channels, weight, attributes, hardware. All for which there is no kernel of our own.
DOUBLES = {
    "sums beyond int32": ("conv2d", 2000, (3, 2000, 1, 1), {"padding": [0, 0]}, "tflite_int16"),
    "a zero point of 16 bits": ("conv2d", 4, (6, 4, 3, 3), {"padding": [1, 1]}, "wide_affine"),
    "transposed": ("conv_transpose2d", 4, (4, 6, 3, 3), {"padding": [1, 1], "output_padding": [0, 0]}, "x86_vnni"),
}


@pytest.mark.parametrize("case", DOUBLES)
def test_sums_of_products_without_a_kernel_run_in_floats(case: str) -> None:
    op, channels, shape, more, name = DOUBLES[case]
    chips = {**EVERY, "wide_affine": Chip("int16", "int64", at="output", scheme="affine").hardware(name="wide_affine")}
    b = Builder()
    attrs = {"stride": [1, 1], "dilation": [1, 1], "groups": 1, **more}
    x = b.input(channels, 5, 4, name="x")
    b.call(op, x, b.const(seeded(*shape, seed=1)), b.const(seeded(shape[op != "conv2d"], seed=2)), name="sums", **attrs)
    plan = plan_of(b.graph(), chips[name], [seeded(2, channels, 5, 4)])
    executor = check(plan, [seeded(3, channels, 5, 4, seed=7, size=3.0)])
    assert executor.explain().rows[-1].kernel == "torch in floats"
    if case == "sums beyond int32":
        signs = plan.nodes["sums"].consts[1][:1].sign()  # every value at the end where the sum grows
        assert plan.nodes["sums"].bound >= 2**31
        check(plan, [1e6 * signs.expand(1, -1, 5, 4).to(torch.float32)])


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("op", ["add", "sub"])
@pytest.mark.parametrize("other", ["itself", "another", "a constant", "a channel's", "an image"])
def test_sums_of_words_with_three_multipliers(op: str, other: str, swapped: bool) -> None:
    b = Builder()
    image = b.input(3, 8, 6, name="x")
    x = b.conv2d(image, seeded(6, 3, 3, 3, seed=1), name="conv")
    others = {
        "itself": lambda: x,
        "another": lambda: b.conv2d(image, seeded(6, 3, 3, 3, seed=2, size=9.0), name="another"),
        "a constant": lambda: b.const(seeded(1, 6, 8, 6, seed=4), name="constant"),
        "a channel's": lambda: b.const(seeded(6, 1, 1, seed=4), name="constant"),
        "an image": lambda: b.call("mean", x, axes=[1], keepdim=True, count=6, name="mean"),
    }
    operands = (x, others[other]())
    graph = b.graph(b.call(op, *(reversed(operands) if swapped else operands), name="sum"))
    executor = check(
        plan_of(graph, EVERY["tflite_int16"], [seeded(2, 3, 8, 6)]), [seeded(3, 3, 8, 6, seed=7, size=3.0)]
    )
    if exact_kernels().passes.exact:
        assert executor.explain().rows[-1].kernel == "native add"


@pytest.mark.parametrize("name", ["vta", "x86_vnni", "int16_wraps", "affine_at_output"])
def test_consecutive_movers_of_which_the_last_has_no_kernel(name: str) -> None:
    """Network 301483 of scripts/fuzz_exactness.py: what readers want was done before the first, and once more after."""
    b = Builder()
    x = b.conv2d(b.input(3, 7, 5, name="x"), seeded(4, 3, 3, 3, seed=1), name="conv")
    size = {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1], "dilation": [1, 1]}
    pool = b.call("max_pool2d", x, name="pool", ceil_mode=False, **size)
    large = b.call("upsample_nearest2d", pool, size=None, factors=[2.0, 2.0], name="large")
    b.conv2d(large, seeded(4, 4, 3, 3, seed=2), name="next")
    check(plan_of(b.graph(), EVERY[name], [seeded(2, 3, 7, 5)]), [seeded(3, 3, 7, 5, seed=7, size=3.0)])


# ---------------------------------------------------------------- other kernels
def _variants() -> dict[str, ExactKernels]:
    found, no = exact_kernels(), Verdict(False, "not to be used")
    return {
        "oneDNN": replace(found, conv=no),
        "oneDNN, sums only": replace(found, conv=no, of_onednn=lambda: (found.onednn, no)),
        "oneDNN alone": replace(found, conv=no, calls=None),
    }


@pytest.mark.parametrize("variant", ["oneDNN", "oneDNN, sums only", "oneDNN alone"])
def test_random_networks_on_other_kernels(variant: str) -> None:
    check_random_networks(_variants()[variant])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_random_networks_with_other_instructions(instruction_set: str) -> None:
    kernels = kernels_for(instruction_set)
    assert kernels.passes.exact and kernels.conv.exact and kernels.words.exact and kernels.products.exact
    check_random_networks(kernels)


@pytest.mark.parametrize("instruction_set", [name for name in INSTRUCTION_SETS if name != "SSE41"])
def test_floats_with_other_instructions(instruction_set: str) -> None:
    """All sets that have a fused multiply-add give the bits that the largest set gives."""
    kernels, largest = kernels_for(instruction_set), kernels_for("")
    assert kernels.softmax.exact == largest.softmax.exact and kernels.norm.exact == largest.norm.exact
    assert kernels.softmax_registers == largest.softmax_registers


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_matrix_tiles_are_exact(instruction_set: str) -> None:
    library = library_for(instruction_set)
    if not library.has_tiles:
        pytest.skip("the instruction set has no matrix tiles")
    assert kernels_for(instruction_set).tiles.exact


@pytest.mark.filterwarnings("ignore:Using padding")
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_layers_with_other_instructions(instruction_set: str) -> None:
    """Every convolution and every fused pooling, on a chip of each arithmetic by turns."""
    kernels = kernels_for(instruction_set)
    chips = itertools.cycle(["x86_vnni", "arm_dot", "affine_at_output", "int16_wraps", "tflite", "tflite_int16", "vta"])
    for case in CONVS:
        channels = CONVS[case][0][0]
        for name in itertools.islice(chips, 7 if whole() else 2):
            plan = plan_of(conv_network(case), EVERY[name], [seeded(2, channels, 9, 7)])
            check(plan, [seeded(3, channels, 9, 7, seed=7, size=3.0)], using=kernels)
    for case in POOLS:
        channels = POOLS[case][0][0]
        for name in itertools.islice(chips, 7 if whole() else 1):
            plan = plan_of(pool_network(case, 17, 13), EVERY[name], [seeded(2, channels, 17, 13)])
            check(plan, [seeded(2, channels, 17, 13, seed=7, size=3.0)], using=kernels)


def check_random_networks(kernels: ExactKernels) -> None:
    """The integers of networks of all ops are those of the reference engine."""
    for seed in range(130, 138):
        rng, graph = random.Random(seed), random_graph(seed)
        data = random_inputs(graph, seed)
        resolver = resolver_of(graph, EVERY[rng.choice(sorted(EVERY))], data, "power2_range")
        for bits in islice(points(resolver.space, seed), 2):
            plan, x = resolver(bits), random_inputs(graph, seed + 1, size=4.0)
            for fast, exact in zip(Executor(plan, using=kernels).run(x), IntegerModel(plan).run(x), strict=True):
                assert count_differing(fast, exact) == 0


# ---------------------------------------------------------------- as a module
def test_models_can_be_copied_and_pickled() -> None:
    graph, x = residual_block(), seeded(2, 3, 8, 8)
    model = NativeIntegerModel(plan_of(graph, EVERY["x86_vnni"], [x]))
    expected = model(x)
    assert expected.equal(model.executor.run([x])[0])
    again = copy.deepcopy(model)
    del model
    assert again(x).equal(expected)
    assert pickle.loads(pickle.dumps(again))(x).equal(expected)
    with ThreadPoolExecutor(4) as threads:
        assert all(out.equal(expected) for out in threads.map(lambda _: again(x), range(16)))


def test_models_can_be_compiled() -> None:
    graph, x = residual_block(), seeded(2, 3, 8, 8)
    model = NativeIntegerModel(plan_of(graph, EVERY["x86_vnni"], [x]))
    expected = model(x)
    assert torch.compile(model, backend="eager")(x).equal(expected)


def test_observed_models_report_every_node() -> None:
    graph, x = residual_block(), seeded(2, 3, 8, 8)
    plan = plan_of(graph, EVERY["x86_vnni"], [x])
    seen: dict[str, Tensor] = {}
    NativeIntegerModel(plan).run([x], lambda node, value: seen.__setitem__(node.name, value))
    expected: dict[str, Tensor] = {}
    IntegerModel(plan).run([x], lambda node, value: expected.__setitem__(node.name, value))
    assert seen.keys() == expected.keys() and all(seen[n].equal(expected[n]) for n in seen)


def test_the_report_names_every_node_once() -> None:
    graph = residual_block()
    found = Executor(plan_of(graph, EVERY["x86_vnni"], [seeded(2, 3, 8, 8)])).explain()
    assert [r.node for r in found.rows] == [n.name for n in graph if n.op not in ("input", "const")]
    assert sum(found.kernels.values()) == len(found.rows) == len(found.to_json()["rows"])
    assert all(r.node in str(found) and r.why for r in found.rows)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(HagoError, match="unknown engine 'referense'"):
        named_engine("referense")


# ---------------------------------------------------------------- batches
def test_a_batch_is_divided_if_samples_are_independent() -> None:
    graph, x = residual_block(), seeded(2, 3, 8, 8)
    plan, whole = plan_of(graph, EVERY["x86_vnni"], [x]), seeded(7, 3, 8, 8, seed=3)
    (expected,) = IntegerModel(plan).run([whole])
    if not exact_kernels().conv.exact:
        pytest.skip(exact_kernels().conv.why)
    for room in (1, 5_000, 10_000, 20_000, 10**6):
        assert Executor(plan, cached_bytes=room).run([whole])[0].equal(expected)


def test_layers_with_smaller_values_run_on_more_samples() -> None:
    if not exact_kernels().conv.exact:
        pytest.skip(exact_kernels().conv.why)
    b, many = Builder(), {"stride": [2, 2]}
    x = b.conv2d(b.input(3, 16, 16, name="x"), seeded(8, 3, 3, 3), name="wide")
    early = b.conv2d(x, seeded(8, 8, 3, 3, seed=1), name="half", **many)
    late = b.conv2d(early, seeded(8, 8, 3, 3, seed=2), name="quarter", **many)
    again = b.call("add", late, b.conv2d(early, seeded(8, 8, 1, 1, seed=3), name="short", padding=[0, 0], **many))
    b.call("mean", again, axes=[2, 3], keepdim=False, count=16, name="mean")
    plan = plan_of(b.graph(), EVERY["x86_vnni"], [seeded(2, 3, 16, 16)])
    whole = seeded(9, 3, 16, 16, seed=3)
    executor = Executor(plan, cached_bytes=8 * 16 * 16 * 4)
    assert len(executor.segments) > 2
    assert [s.at_once for s in executor.segments] == sorted({s.at_once for s in executor.segments})
    assert executor.run([whole])[0].equal(IntegerModel(plan).run([whole])[0])
    in_segments = {name for s in executor.segments for entry in s.scheduled for name in entry.outputs}
    assert in_segments == {name for step in executor.steps() for name in step.outputs}


def test_a_batch_is_not_divided_if_samples_depend_on_each_other() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 4, 4, name="x"), seeded(4, 3, 1, 1), name="conv")
    b.call("opaque", conv, target="aten.cumsum.default", args=[{"$": 0}, 0], kwargs={})
    assert Executor(plan_of(b.graph(), EVERY["x86_vnni"], [seeded(2, 3, 4, 4)])).segments == ()
    c = Builder()
    conv = c.conv2d(c.input(3, 4, 4, name="x"), seeded(4, 3, 1, 1), name="conv")
    c.call("permute", conv, axes=[1, 0, 2, 3])
    plan = plan_of(c.graph(), EVERY["x86_vnni"], [seeded(2, 3, 4, 4)])
    assert Executor(plan).segments == ()
    check(plan, [seeded(5, 3, 4, 4)])


def test_operands_of_float_nodes_are_dequantized_once_and_their_values_quantized_by_kernels() -> None:
    if exact_kernels().calls is None:
        pytest.skip(exact_kernels().passes.why)
    b = Builder()
    conv = b.conv2d(b.input(5, 9, 7, name="x"), seeded(24, 5, 3, 3, seed=1), seeded(24, seed=2), name="conv")
    islands = [b.call("softmax", conv, name="soft", axis=1), b.call("softmax", conv, name="across", axis=3)]
    for i, island in enumerate(islands):
        b.conv2d(island, seeded(4, 24, 1, 1, seed=3 + i), name=f"next{i}", padding=[0, 0])
    plan = plan_of(b.graph(), EVERY["x86_vnni"], [seeded(2, 5, 9, 7)])
    executor = check(plan, [seeded(3, 5, 9, 7, seed=7, size=3.0)])
    reads = {step.outputs[0]: step.inputs for step in executor.steps()}
    assert reads["soft"] == reads["across"] == ("conv!",)
    quantized = [step for step in executor.steps() if step.inputs in (("soft",), ("across",))]
    assert [b"native quantize" in step.digest for step in quantized] == [True, True]
