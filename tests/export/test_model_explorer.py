"""Files for Model Explorer: they have its schema, and show what the Plan and the inspection say."""

from __future__ import annotations

import functools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from building import residual_block
from networks import Small, images, randomized

import hago
from hago.errors import HagoError
from hago.export import ExportFormat, ExportResult
from hago.export.model_explorer import GRAPH_ID, graph_collection, node_data, plan_figures
from hago.search import Quantizer

CHIPS = ("x86_vnni", "int16_accumulator", "cpu_weight_only")

# The schema of model_explorer/graph_builder.py and node_data_builder.py of release 0.1.34: by object, its fields with
# their types, lists with the type of their items; a field that ends in `?` may be missing.
PAIR = {"key": str, "value": str}
EDGE = {"sourceNodeId": str, "sourceNodeOutputId": str, "targetNodeInputId": str}
METADATA = {"id": str, "attrs": [PAIR]}
NODE = {
    **{"id": str, "label": str, "namespace": str, "attrs": [PAIR], "incomingEdges": [EDGE]},
    **{"inputsMetadata": [METADATA], "outputsMetadata": [METADATA]},
}
COLLECTION = {
    "label": str,
    "graphs": [{"id": str, "nodes": [NODE], "groupNodeAttributes": dict}],
    "graphSorting": str,
}
NODE_DATA = {"name": str, "results": dict, "gradient?": [{"stop": (int, float), "bgColor": str}]}
RESULT = {"value": (int, float, str), "bgColor?": str}


def conforms(value: Any, schema: Any) -> bool:
    if isinstance(schema, dict):
        names = {name.rstrip("?"): (name.endswith("?"), kind) for name, kind in schema.items()}
        return (
            isinstance(value, dict)
            and value.keys() <= names.keys()
            and all(may_miss if n not in value else conforms(value[n], kind) for n, (may_miss, kind) in names.items())
        )
    if isinstance(schema, list):
        return isinstance(value, list) and all(conforms(item, schema[0]) for item in value)
    return isinstance(value, schema) and not isinstance(value, bool)


@functools.cache
def quantizer(chip: str) -> Quantizer:
    if chip == CHIPS[1]:
        return hago.quantize(residual_block(), chip, [images(4, 3, 8, 8)])
    return hago.quantize(randomized(Small()), chip, [images(4, 1, 8, 8)])


@functools.cache
def statistic(chip: str) -> Any:
    q = quantizer(chip)
    shape = (3, 8, 8) if chip == CHIPS[1] else (1, 8, 8)
    return hago.inspect_graph_statistic(q.plan.graph, chip, q.strategy, [images(4, *shape)], remedies=False)


@functools.cache
def documents(chip: str) -> dict[str, Any]:
    q = quantizer(chip)
    figures = {**plan_figures(q.plan), **statistic(chip).figures()}
    made = {
        "graph": graph_collection(q.plan, "net", q.strategy.model_hash),
        **{n: node_data(n, values) for n, values in figures.items()},
    }
    return json.loads(json.dumps(made, allow_nan=False))


@pytest.mark.parametrize("chip", CHIPS)
def test_the_files_have_the_schema(chip: str) -> None:
    made = documents(chip)
    assert conforms(made["graph"], COLLECTION)
    for name, document in made.items():
        if name != "graph":
            assert list(document) == [GRAPH_ID] and conforms(document[GRAPH_ID], NODE_DATA), name
            assert all(conforms(result, RESULT) for result in document[GRAPH_ID]["results"].values()), name


def test_the_schema_bites() -> None:
    good = documents(CHIPS[0])["graph"]
    assert not conforms({**good, "extra": 1}, COLLECTION)
    assert not conforms({name: value for name, value in good.items() if name != "label"}, COLLECTION)
    assert not conforms({**good, "graphs": [{**good["graphs"][0], "nodes": [{"id": "a"}]}]}, COLLECTION)
    assert not conforms({"value": True}, RESULT)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_library_reads_the_files(chip: str) -> None:
    builder, data = (pytest.importorskip(f"model_explorer.{name}") for name in ("graph_builder", "node_data_builder"))
    made = documents(chip)
    for graph in made["graph"]["graphs"]:
        for node in graph["nodes"]:
            builder.GraphNode(**node)
        builder.Graph(**graph)
    builder.GraphCollection(**made["graph"])
    for name, document in made.items():
        if name != "graph":
            data.GraphNodeData(**document[GRAPH_ID])


@pytest.mark.parametrize("chip", CHIPS)
def test_every_edge_and_figure_is_of_a_node(chip: str) -> None:
    made, graph = documents(chip), quantizer(chip).plan.graph
    (main,) = made["graph"]["graphs"]
    ids = [node["id"] for node in main["nodes"]]
    assert ids == [node.name for node in graph]
    edges = {
        (e["sourceNodeId"], n["id"], int(e["targetNodeInputId"])) for n in main["nodes"] for e in n["incomingEdges"]
    }
    assert edges == {(source, node.name, slot) for node in graph for slot, source in enumerate(node.inputs)}
    for name, document in made.items():
        if name != "graph":
            assert set(document[GRAPH_ID]["results"]) <= set(ids), name
    assert set(made["accumulator"][GRAPH_ID]["results"]) == {node.name for node in graph.computed}


@pytest.mark.parametrize("chip", CHIPS)
def test_the_side_panel_says_what_the_plan_says(chip: str) -> None:
    plan = quantizer(chip).plan
    nodes = {node["id"]: node for node in documents(chip)["graph"]["graphs"][0]["nodes"]}
    seen = 0
    for node in plan.graph:
        operands = {m["id"]: {p["key"]: p["value"] for p in m["attrs"]} for m in nodes[node.name]["inputsMetadata"]}
        for edge in node.edges:
            target = plan.target(edge)
            if target is None:
                assert str(edge.slot) not in operands
                continue
            shown, seen = operands[str(edge.slot)], seen + 1
            assert shown["dtype"] == target.dtype.name and 2 ** int(shown["bits"]) > target.qmax - target.qmin
            assert float(shown["scale"].partition(",")[0]) == pytest.approx(float(target.scale.flatten()[0]), rel=1e-5)
        attributes = {p["key"]: p["value"] for p in nodes[node.name]["attrs"]}
        if node.name in plan.nodes:
            assert attributes["overflow"].startswith(plan.nodes[node.name].verdict)
    assert seen


def test_layers_are_those_of_the_names() -> None:
    nodes = {node["id"]: node["namespace"] for node in documents(CHIPS[0])["graph"]["graphs"][0]["nodes"]}
    assert nodes["stem.0"] == nodes["stem.0.weight"] == "stem/0"
    assert all(layer.replace("/", ".") in (name, name.rpartition(".")[0]) for name, layer in nodes.items())


def test_numbers_have_colors_from_good_to_bad_and_infinite_ones_none() -> None:
    worse, better = (node_data(name, {"a": 1.0, "b": float("inf")})[GRAPH_ID] for name in ("blame (%)", "SQNR (dB)"))
    assert worse["results"] == {"a": {"value": 1.0}}
    assert [g["stop"] for g in worse["gradient"]] == [0, 1]
    assert [g["bgColor"] for g in worse["gradient"]] == [g["bgColor"] for g in better["gradient"]][::-1]
    assert "gradient" not in node_data("cause", {"a": "rounding"})[GRAPH_ID]


def test_an_export_writes_the_graph_and_a_file_for_every_figure(tmp_path: Path) -> None:
    q = quantizer(CHIPS[0])
    result = q.export(tmp_path / "net", "model_explorer")
    assert {p.name for p in tmp_path.iterdir()} == {"net.graph.json", "net.bits.json", "net.accumulator.json"}
    assert json.loads((tmp_path / "net.graph.json").read_text()) == result.content["graph"]
    q.export(tmp_path / "net.json", "model_explorer", figures=statistic(CHIPS[0]).figures())
    names = {"graph", "bits", "accumulator", "sqnr", "blame", "cause"}
    assert {p.name for p in tmp_path.iterdir()} == {f"net.{name}.json" for name in names}


@pytest.mark.parametrize("name", ["Blame", "graph", "bits (of weights)"])
def test_two_figures_of_one_file_are_refused(name: str, tmp_path: Path) -> None:
    figures = {"blame (%)": {}, name: {}}
    with pytest.raises(HagoError, match=r"would be written to net\.\w+\.json, the file of .*; give it another name"):
        quantizer(CHIPS[0]).export(tmp_path / "net", "model_explorer", figures=figures)
    assert not list(tmp_path.iterdir())


def test_the_command_can_be_pasted_whatever_the_folder_is_called(tmp_path: Path) -> None:
    (tmp_path / "my nets; $HOME").mkdir()
    path = tmp_path / "my nets; $HOME" / "net"
    line = quantizer(CHIPS[0]).export(path, "model_explorer").text.splitlines()[-1]
    data = ",".join(f"{path}.{kind}.json" for kind in ("bits", "accumulator"))
    assert shlex.split(line)[-3:] == ["model-explorer", f"{path}.graph.json", f"--node_data_paths={data}"]


def test_figures_are_for_formats_that_show_them(tmp_path: Path) -> None:
    own = ExportFormat("own", "nothing", lambda request: ExportResult("written", {}))
    with pytest.raises(HagoError, match="shows no figures of nodes; leave figures out"):
        quantizer(CHIPS[0]).export(tmp_path / "net", own, figures=statistic(CHIPS[0]).figures())
    assert quantizer(CHIPS[0]).export(tmp_path / "net", own).text == "written"
