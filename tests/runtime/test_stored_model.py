"""Stored models: a loaded model equals the saved one, and all other files are refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from building import Builder, residual_block, seeded
from chips import Chip
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from ops.samples import among_integers, graph_of
from plans import points, resolver_of
from random_graphs import random_graph, random_inputs
from specs import EVERY, SHIPPED
from torch import Tensor, nn

import hago
from hago.errors import GraphError, HagoError, ModelFileError, UnsupportedOp
from hago.graph.execute import infer_dtypes
from hago.graph.graph import Graph
from hago.hardware.file import load_hardware
from hago.ops import OPS
from hago.ops._rule import IntegerForm, OpRule
from hago.plan.plan import Plan
from hago.runtime.native.executor import NativeIntegerModel
from hago.runtime.reference import IntegerModel
from hago.runtime.stored_model import (
    KIND,
    Provenance,
    StoredSize,
    from_file_bytes,
    is_stored,
    load_plan,
    save_plan,
    to_file_bytes,
)
from hago.serialization.tensor_file import from_bytes, to_bytes
from hago.simulation.simulator import Simulator


def widest(graph: Graph, hardware: hago.Hardware, inputs: list[Tensor]) -> Plan:
    resolver = resolver_of(graph, hardware, inputs)
    return resolver(resolver.space.widest())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
    return bool(a == b)


def check_round_trip(plan: Plan, inputs: list[Tensor]) -> None:
    """Every node's value and every output, integers and floats, and the bytes when it is saved again."""
    data = to_file_bytes(plan)
    again, _ = from_file_bytes(data, "a test", plan.ops)
    assert again.key == plan.key and to_file_bytes(again) == data
    assert again.verdicts == plan.verdicts and str(again.graph) == str(plan.graph)
    assert again.graph.nodes == infer_dtypes(plan.graph, plan.ops).nodes
    seen: list[Any] = []
    first = IntegerModel(plan).run(inputs, lambda node, value: seen.append(value))
    seen.reverse()
    second = IntegerModel(again).run(inputs, lambda node, value: seen and _equal(node.name, seen.pop(), value))
    assert not seen and all(same(a, b) for a, b in zip(first, second, strict=True))
    assert all(same(a, b) for a, b in zip(first, Simulator(again).run(inputs), strict=True))
    for name, node in plan.nodes.items():
        other = again.nodes[name]
        assert (node.bound, node.raw_bound, node.parts) == (other.bound, other.raw_bound, other.parts)
        assert list(node.consts) == list(other.consts)
        assert all(same(a, b) for a, b in zip(node.consts.values(), other.consts.values(), strict=True))


def _equal(name: str, a: Any, b: Any) -> None:
    assert same(a, b), name


# ---------------------------------------------------------------- what is loaded is what was saved
@pytest.mark.parametrize("seed", range(25))
def test_random_networks(seed: int) -> None:
    graph, rng = random_graph(seed), random.Random(seed)
    chips = EVERY
    for name in rng.sample(sorted(chips), 2):
        resolver = resolver_of(graph, chips[name], random_inputs(graph, seed))
        for bits in islice(points(resolver.space, seed), 2):
            check_round_trip(resolver(bits), random_inputs(graph, seed + 1, batch=2))


KEYS = [(name, i) for name, rule in OPS.items() for i in range(len(rule.samples))] + [("affine", r) for r in (2, 3, 4)]


@pytest.mark.parametrize("spec", SHIPPED)
def test_every_op_sample_on_shipped_hardware(spec: str) -> None:
    """Every sample meets one of the specs, and every spec its share of the samples."""
    ran = 0
    for name, index in KEYS[list(SHIPPED).index(spec) :: len(SHIPPED)]:
        graph = graph_of(name, index)
        inputs = [_example(graph, n) for n in graph.inputs]
        if OPS[name].integer is not None and SHIPPED[spec].integer_descs(name):
            graph = among_integers(graph)
        try:
            plan = widest(graph, SHIPPED[spec], inputs)
        except UnsupportedOp:
            continue
        check_round_trip(plan, inputs)
        ran += 1
    assert ran > len(KEYS) / len(SHIPPED) / 2


def _example(graph: Graph, name: str) -> Tensor:
    node = graph[name]
    shape = (2, *(node.shape or (1,))[1:])
    return torch.rand(shape) if node.dtype == "float32" else torch.zeros(shape, dtype=node.torch_dtype)


class Nested(nn.Module):
    """Arguments by name, results in a dict, and a float island between."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5)

    def forward(self, image: Tensor, scale: Tensor) -> dict[str, Any]:
        x = self.norm(self.conv(image)) * scale
        return {"scores": self.head(x), "features": [x, x.cumsum(1)]}


def nested() -> tuple[hago.Quantizer, Tensor, Tensor]:
    torch.manual_seed(0)
    image, scale = torch.randn(4, 3, 8, 8), torch.rand(4, 4, 6, 6)
    return hago.quantize(Nested().eval(), "x86_vnni", [(image, scale)]), image, scale


def test_a_model_is_saved_and_loaded(tmp_path: Path) -> None:
    quantizer, image, scale = nested()
    model = quantizer.realize()
    size = model.save(tmp_path / "m.safetensors")
    loaded = hago.load_integer_model(tmp_path / "m.safetensors")
    assert type(loaded) is type(model) and size.file == (tmp_path / "m.safetensors").stat().st_size
    assert size.float_model == 4 * sum(p.numel() for p in Nested().parameters())
    a, b = model(image, scale=scale), loaded(image, scale=scale)
    assert a["scores"].equal(b["scores"]) and all(map(torch.equal, a["features"], b["features"]))
    assert loaded.provenance == Provenance.of(quantizer.strategy)
    assert is_stored(tmp_path / "m.safetensors") and not is_stored(__file__) and not is_stored("nowhere")


def test_another_process_gives_the_same_bits(tmp_path: Path) -> None:
    quantizer, image, scale = nested()
    model = quantizer.realize()
    model.save(tmp_path / "m.safetensors")
    torch.save([image, scale], tmp_path / "x.pt")
    code = (
        "import hago, torch; torch.set_num_threads(1)\n"
        "image, scale = torch.load('x.pt', weights_only=True)\n"
        "out = hago.load_integer_model('m.safetensors')(image, scale)\n"
        "torch.save([out['scores'], *out['features']], 'y.pt')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300, env={**os.environ})
    out = model(image, scale)
    found = torch.load(tmp_path / "y.pt", weights_only=True)
    assert all(map(torch.equal, found, [out["scores"], *out["features"]]))


def test_models_are_copied_and_pickled_in_their_stored_form() -> None:
    quantizer, image, scale = nested()
    model = quantizer.realize()
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert other(image, scale)["scores"].equal(model(image, scale)["scores"])
        assert other.provenance == model.provenance


def test_layouts_of_float_weights_are_kept() -> None:
    b = Builder()
    x = b.input(3, 8, 8)
    weight = seeded(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    attrs = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    graph = b.graph(b.call("conv2d", x, b.const(weight, "w"), **attrs))
    plan = widest(graph, hago.Hardware({}), [seeded(2, 3, 8, 8)])
    again, _ = from_file_bytes(to_file_bytes(plan), "a test")
    assert again.graph.consts["w"].stride() == weight.stride() and again.graph.consts["w"].equal(weight)


def test_safetensors_reads_the_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    quantizer, *_ = nested()
    quantizer.realize().save(tmp_path / "m.safetensors")
    found = safetensors.load_file(tmp_path / "m.safetensors")
    _, ours = from_bytes((tmp_path / "m.safetensors").read_bytes(), KIND, "a test")
    assert set(found) == set(ours) and all(same(found[n], ours[n]) for n in ours)


# ---------------------------------------------------------------- what stands in a file
def test_only_float_islands_have_float_weights() -> None:
    plan = nested()[0].plan
    document, tensors = from_bytes(to_file_bytes(plan), KIND, "a test")
    assert set(document["graph"]["consts"]) == {"norm.weight", "norm.bias"}
    assert tensors["head.weight"].dtype == torch.int8 and tensors["conv.weight"].dtype == torch.int8
    again, _ = from_file_bytes(to_file_bytes(plan), "a test")
    missing = again.graph.consts["head.weight"]
    assert missing.device.type == "meta" and missing.shape == plan.graph.consts["head.weight"].shape


@pytest.mark.parametrize("bits, per_byte", [(8, 1), (4, 2), (3, 2), (2, 4)])
def test_narrow_weights_share_bytes(bits: int, per_byte: int) -> None:
    b = Builder()
    x = b.input(64)
    graph = b.graph(b.call("linear", x, b.const(seeded(33, 64), "w"), name="fc"))
    resolver = resolver_of(graph, Chip(min_bits=2).hardware(), [seeded(4, 64)])
    plan = resolver(resolver.space.widest() | {"fc:1": bits})
    _, tensors = from_bytes(to_file_bytes(plan), KIND, "a test")
    assert tensors["w"].numel() == 33 * 64 // per_byte and tensors["w"].element_size() == 1
    check_round_trip(plan, [seeded(4, 64)])


def test_shared_weights_are_stored_once() -> None:
    b = Builder()
    x, w = b.input(32, name="x"), b.const(seeded(32, 32), "w")
    graph = b.graph(b.call("linear", b.call("linear", x, w), w))
    plan = widest(graph, Chip().hardware(), [seeded(4, 32)])
    _, tensors = from_bytes(to_file_bytes(plan), KIND, "a test")
    assert [n for n in tensors if n.startswith("w")] == ["w"]


# ---------------------------------------------------------------- what cannot be stored
def _double(attrs: Any, x: Tensor) -> Tensor:
    return x * 2.0


def _int_double(attrs: Any, x: Tensor) -> Tensor:
    return x * 2


DOUBLE = OpRule(
    name="double",
    aten=(),
    parse=lambda call: None,
    compute=_double,
    integer=IntegerForm(slots=("follow",), compute=_int_double, bound=lambda attrs, o: o[0].magnitude * 2),
)
OURS = {**OPS, "double": DOUBLE}


def with_double() -> Plan:
    b = Builder(OURS)
    x = b.input(4)
    graph = b.graph(b.call("double", b.call("linear", x, b.const(seeded(4, 4))), name="twice"))
    resolver = resolver_of(graph, Chip().hardware(OURS), [seeded(3, 4)], ops=OURS)
    return resolver(resolver.space.widest())


def test_ops_of_the_user_are_loaded_with_their_rules(tmp_path: Path) -> None:
    plan = with_double()
    assert "twice" in plan.nodes
    check_round_trip(plan, [seeded(3, 4)])
    save_plan(tmp_path / "m", plan)
    with pytest.raises(ModelFileError, match="'twice' is of the op 'double'.*ops="):
        load_plan(tmp_path / "m")
    assert load_plan(tmp_path / "m", OURS)[0].key == plan.key


def test_a_changed_rule_is_not_mistaken_for_hagos_own() -> None:
    ours = {**OPS, "relu": replace(OPS["relu"], compute=_double)}
    resolver = resolver_of(residual_block(), Chip().hardware(ours), [seeded(2, 3, 8, 8)], ops=ours)
    plan = resolver(resolver.space.widest())
    with pytest.raises(ModelFileError, match="'relu', which is none of hago's own"):
        from_file_bytes(to_file_bytes(plan), "a test")


@pytest.mark.parametrize(
    "target, why",
    [
        ("load_library", "not among the operators"),
        ("torchvision.nms.default", "not among the operators"),
        ("aten.__class__.mro", "not among the operators"),
        ("aten.from_file.default", "not among the operators"),
        ("aten.segment_reduce.default", "not among the operators"),
        ("aten.add_.Tensor", "not among the operators"),
        ("aten.add.out", "changes its operands"),
        ("aten.add.no_such_thing", "has no operator"),
        ("sym_max", "not among the operators"),
    ],
)
def test_only_safe_operators_are_named_by_files(target: str, why: str) -> None:
    b = Builder()
    x = b.input(4)
    b.call("opaque", x, name="odd", target="aten.cumsum.default", args=[{"$": 0}, 1], kwargs={})
    good = widest(b.graph("odd"), Chip().hardware(), [seeded(3, 4)])
    odd = {"target": target, "args": [{"$": 0}], "kwargs": {}}
    nodes = tuple(n if n.name != "odd" else type(n)(n.name, n.op, n.inputs, odd, n.shape) for n in good.graph)
    plan = Plan(Graph(nodes, good.graph.inputs, good.graph.outputs), good.hardware, good.ops, {}, good.edges)
    with pytest.raises(GraphError, match=f"node 'odd' cannot be stored.*{why}"):
        to_file_bytes(plan)

    def forge(document: Any) -> None:
        next(n for n in document["graph"]["nodes"] if n["name"] == "odd")["attrs"] = odd

    with pytest.raises(ModelFileError, match=why):
        from_file_bytes(changed(to_file_bytes(good), forge), "a test")


def test_nodes_without_a_stored_form_are_named(tmp_path: Path) -> None:
    plan = with_double()
    nodes = tuple(
        type(n)(n.name, n.op, n.inputs, {"table": object()} if n.name == "twice" else n.attrs, n.shape)
        for n in plan.graph
    )
    odd = Graph(nodes, plan.graph.inputs, plan.graph.outputs, plan.graph.consts)
    path = tmp_path / "m"
    path.write_text("old")
    with pytest.raises(GraphError, match=r"node 'twice' cannot be stored: twice.attrs.table is a object"):
        save_plan(path, Plan(odd, plan.hardware, plan.ops, plan.nodes, plan.edges))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------- files that are not whole, or not ours
def small_plan() -> Plan:
    b = Builder()
    x = b.input(3, name="x")
    h = b.call("relu", b.call("linear", x, b.const(seeded(8, 3), "w"), name="first"), name="act")
    graph = b.graph(b.call("softmax", b.call("linear", h, b.const(seeded(3, 8), "v"), name="last"), axis=-1))
    hardware = Chip().hardware()
    used = {op: descs for op, descs in hardware.ops.items() if op in ("linear", "relu")}
    return widest(graph, hago.Hardware(used, name="small"), [seeded(5, 3)])


@pytest.fixture(scope="module")
def data() -> bytes:
    return to_file_bytes(small_plan(), Provenance("m", {"first:0": 8}, {"searcher": {"name": "greedy"}}))


def refused(data: bytes) -> ModelFileError:
    with pytest.raises(ModelFileError) as found:
        from_file_bytes(data, "the file")
    assert "the file" in str(found.value)
    return found.value


def test_truncated_files_are_refused(data: bytes) -> None:
    cuts = {*range(0, 80), *range(len(data) - 200, len(data)), *range(0, len(data), 23)}
    for length in sorted(cuts):
        refused(data[:length])
    refused(data + b"\0")


def test_flipped_bits_are_detected(data: bytes) -> None:
    rng = random.Random(0)
    for place in [*range(120), *(rng.randrange(len(data)) for _ in range(400))]:
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.randrange(8)
        refused(bytes(flipped))


@given(st.binary(max_size=200))
@hypothesis_settings(max_examples=60)
def test_other_bytes_are_refused(other: bytes) -> None:
    refused(other)
    refused(len(other).to_bytes(8, "little") + other)


def test_other_kinds_of_files_are_named(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    assert "is not a hago integer model" in str(refused(safetensors.save({"w": torch.zeros(3)})))
    assert "but a song" in str(refused(to_bytes("song", {}, {})))
    torch.save({"w": torch.zeros(3)}, tmp_path / "m.pt")
    for path, why in (
        (tmp_path / "m.pt", "is not a hago integer model"),
        (tmp_path, "cannot read"),
        ("gone", "cannot read"),
    ):
        with pytest.raises(ModelFileError, match=why):
            hago.load_integer_model(path)


def changed(data: bytes, change: Callable[[Any], Any]) -> bytes:
    """The file with another document and a checksum that fits."""
    document, tensors = from_bytes(data, KIND, "a test")
    change(document)
    return to_bytes(KIND, document, tensors)


def _set(*path: Any, to: Any) -> Callable[[Any], Any]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


_IMPORT = '[{"__enum__": true, "fqn": "antigravity:x", "name": "y"}]'
ENUM = json.dumps([1, {"type": "builtins.dict", "context": _IMPORT, "children_spec": []}])
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "newer": (_set("version", to=2), "a larger one is written by a newer hago"),
    "no version": (lambda d: d.pop("version"), "at .*version"),
    "a key more": (_set("more", to=1), "no key 'more'"),
    "no such qparams": (_set("edges", "first:0", to=[None, 99]), "number 99 of a table"),
    "no such edge": (_set("edges", "first:7", to=[None, 0]), "the graph has no edge first:7"),
    "no such node": (lambda d: d["graph"]["nodes"].pop(), "contradict"),
    "no such op": (_set("graph", "nodes", -1, "op", to="teleport"), "op 'teleport', which is none of hago's own"),
    "no such signature": (_set("plans", "first", "desc", to=7), "contradict"),
    "no such tensor": (_set("plans", "first", "consts", "1", "at", to="x"), "contradict"),
    "another shape": (_set("plans", "first", "consts", "1", "shape", to=[8, 4]), "expected"),
    "another dtype": (_set("plans", "first", "consts", "1", "dtype", to="ops"), "dtype 'ops'"),
    "out of range": (_set("qparams", 0, "qmax", to=0), "integers within range"),
    "past the dtype": (_set("qparams", 0, "qmax", to=999), "contradict"),
    "a scale of zero": (_set("scales", 0, "values", to=[0.0]), "not positive"),
    "another chip": (_set("hardware", "rounding", to="half_up"), "not have the hash"),
    "a chip's mistake": (_set("hardware", "rounding", to="half_off"), "half_off"),
    "an import": (_set("graph", "in_spec", to=ENUM), "without importing"),
    "a kind of value": (_set("plans", "first", "attrs", to={"a": {"hago": "module", "name": "os"}}), "kind 'module'"),
    "a digest": (_set("plans", "first", "digest", to="zz"), "digest"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_document_that_contradicts_itself_is_refused(data: bytes, what: str) -> None:
    change, why = WRONG[what]
    with pytest.raises(ModelFileError, match=why):
        from_file_bytes(changed(data, change), "the file")


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for k, v in inner for p in _places(v, (*path, k)))]


@given(st.data())
@hypothesis_settings(max_examples=150)
def test_any_document_is_loaded_or_refused_by_name(data: bytes, draw: st.DataObject) -> None:
    document, _ = from_bytes(data, KIND, "a test")
    path = draw.draw(st.sampled_from(_places(document)[1:]))
    other = draw.draw(st.sampled_from([None, True, -1, 0, 3, 1e9, "x", "float32", [], [0], {}, {"hago": "qparams"}]))
    forged = changed(data, _set(*path, to=other))
    try:
        plan, _ = from_file_bytes(forged, "the file")
    except ModelFileError:
        return
    assert isinstance(plan, Plan)


# ---------------------------------------------------------------- writing
def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    plan, old = small_plan(), b"what stood there"
    (tmp_path / "m").write_bytes(old)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelFileError, match="No space left"):
        save_plan(tmp_path / "m", plan)
    with pytest.raises(HagoError, match="cannot write"):
        save_plan(tmp_path / "no" / "m", plan)
    assert (tmp_path / "m").read_bytes() == old and list(tmp_path.iterdir()) == [tmp_path / "m"]


def test_equal_plans_give_equal_bytes() -> None:
    assert to_file_bytes(small_plan()) == to_file_bytes(small_plan())


@pytest.mark.parametrize("engine", [NativeIntegerModel, IntegerModel])
def test_only_the_models_own_state_dict_is_loaded(engine: type[IntegerModel]) -> None:
    """A model that took other weights would compute with some of them, and store the old ones."""
    x = seeded(2, 3, 8, 8)
    resolver = resolver_of(residual_block(), load_hardware("x86_vnni"), [x])
    model = nn.Sequential(engine(resolver(resolver.space.widest())))
    own, before = {k: v.clone() for k, v in model.state_dict().items()}, model(x)
    assert not any(model.load_state_dict(own))
    name = next(iter(own))
    for other in (own[name] + 1, own[name][:1], None):
        with pytest.raises(
            RuntimeError, match=f"{name}: not this integer|size mismatch for {name}|expected torch.Tensor"
        ):
            model.load_state_dict({**own, name: other})
    for other in (own[name].double(), own[name] + 1, own[name].to("meta")):
        with pytest.raises(RuntimeError, match=f"{name}: not this integer model's own values"):
            model.load_state_dict({**own, name: other}, assign=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: v for k, v in own.items() if k != name})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**own, "0.more": own[name]})
    hooked: list[str] = []
    model[0].register_load_state_dict_pre_hook(lambda *given: hooked.append("called"))
    assert not any(model.load_state_dict(own)) and hooked == ["called"]
    assert model(x).equal(before) and all(v.equal(own[k]) for k, v in model.state_dict().items())


def test_sizes_are_reported_larger_or_smaller() -> None:
    assert str(StoredSize(4000, 1000)) == "a file of 1000 B, 4.00 times less than the weights in float"
    assert str(StoredSize(1000, 2500)) == "a file of 2.441 KiB, 2.50 times more than the weights in float"
