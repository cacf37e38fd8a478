"""Hardware that is constructed in Python, its table and its hash."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

import hago
from hago.arithmetic.numerics import Requantize
from hago.arithmetic.types import INT8, INT16, INT32
from hago.errors import HagoError, HardwareError
from hago.hardware.file import check_hardware, hardware_hash, load_hardware
from hago.hardware.hardware import (
    Accumulator,
    FixedOut,
    Groups,
    Hardware,
    OpDesc,
    TensorScheme,
    create_sample_hardware,
)


def rfc_hardware() -> Hardware:
    """As the RFC writes it: a defaultdict of lists, op names with their `nn.` prefix."""
    desc: dict[str, list[OpDesc]] = defaultdict(list)
    desc["nn.conv2d"].append(OpDesc(in_dtypes=["int8", "int8"], out_dtypes=["int32"]))
    desc["add"].append(OpDesc(in_dtypes=["float32", "float32"], out_dtypes=["float32"]))
    desc["add"].append(OpDesc(in_dtypes=["int32", "int32"], out_dtypes=["int32"]))
    return Hardware(desc)


def test_rfc_construction() -> None:
    hardware = rfc_hardware()
    (conv,) = hardware.integer_descs("conv2d")
    assert (conv.in_dtypes, conv.out_dtype, conv.register) == ((INT8, INT8), INT32, Accumulator(INT32, "wrap"))
    assert [d.is_integer for d in hardware.ops["add"]] == [False, True]
    assert hardware.float_descs("softmax")[0].out_dtype.name == "float32"
    assert hardware.float_descs("conv2d") == ()
    check_hardware(hardware)


def test_a_single_dtype_applies_to_all_operands() -> None:
    desc = OpDesc("int8", "int16")
    assert [desc.in_dtype(slot) for slot in range(3)] == [INT8] * 3
    assert desc.bias_dtype(2) == INT16
    assert OpDesc(["int8", "int8", "int32"], "int16").bias_dtype(2) == INT32


def test_an_alias_adds_to_the_op_it_names() -> None:
    first, second = OpDesc("int32", "int32"), OpDesc("int8", "int8")
    assert Hardware({"relu": (first,), "nn.relu": (second,)}).ops == {"relu": (first, second)}


def test_signatures_compare_without_their_names() -> None:
    assert OpDesc("int8", "int8", name="a") == OpDesc("int8", "int8", name="b")
    assert OpDesc("int8", "int8") != OpDesc("int8", "int8", max_bits=6)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Hardware({"conv2": (OpDesc("int8", "int32"),)}), "Did you mean 'conv2d'?"),
        (lambda: OpDesc("int", "int32"), "unknown dtype 'int'"),
        (lambda: OpDesc([], "int32"), "needs in_dtypes"),
        (lambda: OpDesc("int8", ["int8", "int16"]), "exactly one out_dtype"),
        (lambda: OpDesc(["int8", "float32"], "int32"), "mixes integer and float"),
        (lambda: TensorScheme("hag"), "Did you mean 'hago'?"),
        (lambda: TensorScheme("hago", "per_row"), "per_tensor or per_channel"),  # type: ignore[arg-type]
        (lambda: Requantize("float"), "Did you mean 'float32'?"),  # type: ignore[arg-type]
    ],
)
def test_refusals(build: object, says: str) -> None:
    assert callable(build)
    with pytest.raises(HagoError, match=says.replace("?", r"\?")):
        build()


def test_contradictions_in_hardware_constructed_in_python_are_reported() -> None:
    desc = OpDesc("int8", "int8", accumulator=Accumulator(INT32), name="mac", form="sideways")
    hardware = Hardware(
        {"conv2d": (desc,)},
        activation=TensorScheme("affine", "per_channel"),
        requantize=Requantize("shift", multiplier_bits=7),
        cost={"clock": 1.0},
    )
    with pytest.raises(HardwareError) as caught:
        check_hardware(hardware)
    for part in (
        "$.signatures.mac.out",
        "$.ops.conv2d[0]: conv2d has no form",
        "$.activation.granularity",
        "$.requantize.multiplier_bits",
        "$.cost.clock: unknown key",
    ):
        assert part in str(caught.value), part


def test_hardware_constructed_in_python_is_checked_on_use() -> None:
    edge = OpDesc(["int8", "int8"], "int32", name="edge")
    output = replace(edge, out_dtypes="int8", accumulator=Accumulator(INT32), requantize_at="output", name="output")
    module, data = torch.nn.Conv2d(1, 1, 1).eval(), [torch.ones(1, 1, 2, 2)]
    with pytest.raises(HardwareError, match=r"requantize in two places \(edge: edge, output: output\)"):
        hago.quantize(module, Hardware({"conv2d": [edge, output]}), data)
    changed = replace(load_hardware("sample"), ops={"conv2d": [edge, output]})
    with pytest.raises(HardwareError, match="requantize in two places"):
        hago.explain(module, changed, data)


def test_the_hash_ignores_spelling() -> None:
    hardware = rfc_hardware()
    same = Hardware(
        {
            "add": tuple(replace(d, name=f"s{i}") for i, d in enumerate(hardware.ops["add"])),
            "conv2d": hardware.ops["conv2d"],
        },
        sources=("a source",),
        notes=("a note",),
        origin="x.json",
    )
    assert hardware_hash(same) == hardware_hash(hardware)


def test_the_hash_covers_every_fact() -> None:
    hardware = rfc_hardware()
    conv, add = hardware.ops["conv2d"][0], hardware.ops["add"]
    others = [
        replace(hardware, name="other"),
        replace(hardware, other_ops="reject"),
        replace(hardware, cost={"cores": 2}),
        replace(hardware, activation=TensorScheme("affine")),
        replace(hardware, weight=TensorScheme("hago", "per_channel")),
        replace(hardware, requantize=Requantize(rounding="half_up")),
        replace(hardware, requantize=Requantize("multiplier_shift")),
        replace(hardware, requantize=Requantize("multiplier_shift", two_stage=True)),
        replace(hardware, requantize=Requantize("multiplier_shift", search="least_error")),
        replace(hardware, ops={**hardware.ops, "add": add[::-1]}),
        *(
            replace(hardware, ops={**hardware.ops, "conv2d": (changed,)})
            for changed in (
                replace(conv, min_bits=5),
                replace(conv, max_bits=7),
                replace(conv, requantize_at="output"),
                replace(conv, accumulator=Accumulator(INT32, "saturate_end")),
                replace(conv, in_dtypes="int8"),
                replace(conv, cost={"macs_per_cycle": 64}),
                replace(conv, out_dtypes="int16"),
                replace(conv, form="common_scale"),
                replace(conv, requantize_at="output", fixed_out=FixedOut(0.5)),
                OpDesc(["float32", "int4"], "float32"),
                OpDesc(["float32", "int4"], "float32", groups=Groups(32)),
                OpDesc(["float32", "int4"], "float32", groups=Groups(64)),
            )
        ),
    ]
    changed = {f.name for h in others for f in fields(h) if getattr(h, f.name) != getattr(hardware, f.name)}
    assert changed == {f.name for f in fields(Hardware) if f.compare} - {"sources", "notes", "processor"}
    descs = [h.ops["conv2d"][0] for h in others]
    varied = {f.name for d in descs for f in fields(d) if getattr(d, f.name) != getattr(conv, f.name)}
    assert varied >= {f.name for f in fields(OpDesc) if f.compare}
    hashes = [hardware_hash(h) for h in (hardware, *others)]
    assert len(set(hashes)) == len(hashes)


def test_equal_numbers_of_different_types_hash_equally() -> None:
    whole, real = (replace(rfc_hardware(), cost={"cores": n}) for n in (2, 2.0))
    assert whole == real
    assert hardware_hash(whole) == hardware_hash(real)


def test_table() -> None:
    table = create_sample_hardware().table()
    lines = str(table).splitlines()
    assert lines[0].startswith("sample: activations hago per_tensor, weights hago per_tensor, requantize float32")
    first = lines.index("") + 2
    assert lines[first - 3] == "from Python"
    assert " ".join(lines[first - 1].split()) == "op operands result register requantize signature"
    assert " ".join(lines[first].split()) == "conv2d int8 int8 int32 int32 wrap edge"
    assert len(lines) == first + sum(map(len, create_sample_hardware().ops.values()))
    with pytest.raises(FrozenInstanceError):
        table.head = ""  # type: ignore[misc]


def test_table_as_json() -> None:
    table = rfc_hardware().table()
    said = json.loads(json.dumps(table.to_json()))
    assert said["head"] == table.head
    assert said["rows"][1] == {
        "op": "add",
        "operands": ["float32", "float32"],
        "result": "float32",
        "register": "-",
        "overflow": "-",
        "requantize": "-",
        "form": "-",
        "source": "Python",
    }


def test_an_accumulator_has_an_overflow_that_is_listed() -> None:
    with pytest.raises(HardwareError, match="unknown overflow 'saturates' of an accumulator; known: wrap, "):
        Accumulator(INT32, "saturates")  # type: ignore[arg-type]
