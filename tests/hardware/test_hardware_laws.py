"""Hardware documents: round trip, hash, and no input that raises anything but HardwareError."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specs import SHIPPED

from hago.arithmetic import numerics
from hago.arithmetic.numerics import Requantize
from hago.arithmetic.rounding import ROUNDINGS
from hago.arithmetic.schemes import SCHEMES, TWO_SIDED
from hago.arithmetic.types import DTYPES, DType
from hago.errors import HardwareError
from hago.hardware import hardware
from hago.hardware.file import hardware_from_document, hardware_hash, hardware_to_document, load_hardware, save_hardware
from hago.hardware.hardware import Accumulator, Groups, Hardware, OpDesc, TensorScheme
from hago.hardware.validation import check_hardware_document
from hago.ops import OPS

Document = dict[str, Any]

_FLOAT = OpDesc("float32", "float32", cost={"macs_per_cycle": 16})
SMALL = Hardware(
    {
        "conv2d": (OpDesc(["uint8", "int8", "int32"], "int32", name="mac", cost={"macs_per_cycle": 64}), _FLOAT),
        "add": (OpDesc("int32", "int32", max_bits=23), _FLOAT),
    },
    name="small",
    weight=TensorScheme("hago", "per_channel"),
    cost={"clock_hz": 3e9},
)
#: Strategies and logs hold it, so it must stay the same in every version.
SMALL_HASH = "e29dd2da9fa603f9e0fbd80d208737a1fb16a5f5040f507dbbbb3c77cc00cb7d"

_INTEGERS = [d for d in DTYPES.values() if d.is_int]


@st.composite
def registers(draw: st.DrawFn, register: DType) -> Accumulator:
    """With what any op may do past its range."""
    overflow = draw(st.sampled_from(["wrap", "saturate_end", "saturate_each"]))
    if overflow != "saturate_each":
        return Accumulator(register, overflow)
    order, bias = st.sampled_from(get_args(numerics.Order)), st.sampled_from(get_args(numerics.BiasAt))
    return Accumulator(register, overflow, draw(order), draw(bias))


@st.composite
def descs(draw: st.DrawFn, at: hardware.RequantizeAt) -> OpDesc:
    if draw(st.booleans()):
        name = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
        return OpDesc(name, name, cost=draw(st.sampled_from([{}, {"macs_per_cycle": 16}])))
    operands = draw(st.lists(st.sampled_from(_INTEGERS), min_size=1, max_size=3))
    widest, narrowest = max(d.bits for d in operands), min(d.bits for d in operands)
    register = draw(st.sampled_from([d for d in _INTEGERS if d.bits >= widest]))
    low = draw(st.integers(2, min(4, narrowest)))
    return OpDesc(
        operands,
        register if at == "edge" else draw(st.sampled_from(_INTEGERS)),
        accumulator=draw(registers(register)),
        requantize_at=at,
        name=draw(st.sampled_from(["", "a", "b"])),
        min_bits=low,
        max_bits=draw(st.one_of(st.just(64), st.integers(low, widest))),
        cost=draw(st.dictionaries(st.sampled_from(["macs_per_cycle", "picojoules_per_mac"]), st.floats(0.5, 1e9))),
    )


@st.composite
def in_groups(draw: st.DrawFn, scheme: str) -> OpDesc:
    """A signature with groups of a weight: alone, or in products of integers."""
    size = draw(st.integers(2, 300))
    if scheme in TWO_SIDED or draw(st.booleans()):
        return OpDesc(["float32", draw(st.sampled_from(["int4", "uint8"]))], "float32", groups=Groups(size))
    partial = draw(st.sampled_from([None, DTYPES["int8"], DTYPES["int16"]]))
    return OpDesc(["int8", "int4"], "int16", groups=Groups(size, draw(st.integers(2, 8)), partial))


@st.composite
def hardwares(draw: st.DrawFn) -> Hardware:
    form = draw(st.sampled_from(get_args(numerics.RequantizeForm)))
    bits, two_stage = 31, False
    if form == "multiplier_shift":
        bits, two_stage = draw(st.sampled_from([(31, False), (31, True), (7, False)]))
    schemes = st.sampled_from(["hago"] if form == "shift" else list(SCHEMES))
    ops = st.sampled_from(["conv2d", "add", "linear", "relu", "nn.conv2d"])
    at = draw(st.sampled_from(get_args(hardware.RequantizeAt)))  # an op has one
    words = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9), max_size=2)
    weight = TensorScheme(draw(schemes), draw(st.sampled_from(get_args(hardware.Granularity))))
    grouped = draw(st.dictionaries(st.sampled_from(["conv1d", "conv3d"]), in_groups(weight.scheme), max_size=1))
    listed = draw(st.dictionaries(ops, st.lists(descs(at), min_size=1, max_size=3, unique_by=str), min_size=1))
    registers = [d.register.dtype for each in listed.values() for d in each]
    too_wide = form == "multiplier_shift" and any(d.is_int and d.bits + bits > 63 for d in registers)
    wide = "reduced" if too_wide else None
    return Hardware(
        ops={**listed, **{op: (desc,) for op, desc in grouped.items()}},
        name=draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)),
        activation=TensorScheme(draw(schemes)),
        weight=weight,
        requantize=Requantize(form, draw(st.sampled_from(list(ROUNDINGS))), bits, two_stage, wide=wide),
        other_ops=draw(st.sampled_from(get_args(hardware.OtherOps))),
        cost=draw(st.dictionaries(st.sampled_from(["clock_hz", "cores"]), st.integers(1, 10**12))),
        sources=tuple(draw(words)),
        notes=tuple(draw(words)),
    )


def listed_twice(chip: Hardware) -> bool:
    """Whether an op has one signature twice (under two spellings of its name): files refuse that."""
    return any(d in ds[:i] for ds in chip.ops.values() for i, d in enumerate(ds))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hardwares())
def test_round_trip(tmp_path: Path, chip: Hardware) -> None:
    path = tmp_path / "chip.json"
    if listed_twice(chip):
        with pytest.raises(HardwareError, match="each entry once"):
            save_hardware(chip, path)
        return
    save_hardware(chip, path)
    again = load_hardware(path)
    assert again == chip
    assert hardware_hash(again) == hardware_hash(chip)
    assert hardware_to_document(again)["ops"].keys() == hardware_to_document(chip)["ops"].keys()


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same JSON with the keys of its objects in another order."""
    if isinstance(value, dict):
        keys = rng.sample(list(value), len(value))
        return {k: shuffled(value[k], rng) for k in keys}
    return [shuffled(v, rng) for v in value] if isinstance(value, list) else value


@given(st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(rng: random.Random) -> None:
    one, other = (
        hardware_from_document(d, "", OPS)
        for d in (hardware_to_document(SMALL), shuffled(hardware_to_document(SMALL), rng))
    )
    assert one == other
    assert hardware_hash(one) == hardware_hash(other)


def test_the_hash_does_not_change_between_versions() -> None:
    assert hardware_hash(SMALL) == SMALL_HASH


_JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.floats(), st.just(10**400), st.just([]), st.just({}),
    st.sampled_from(["", "int8", "int9", "float32", "uint16", "output", "shift", "affine", "i32", "f32", "\ud800"]),
    st.lists(st.sampled_from(["int8", "int32", "f32", "i32"]), max_size=3),
    st.dictionaries(st.sampled_from(["in", "out", "form", "dtype", "scheme"]), st.just("int8"), max_size=3),
)  # fmt: skip


def mutate(document: Any, draw: Callable[[Any], Any]) -> Any:
    """One part replaced, dropped, repeated under another key, or moved."""
    places: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        at = waiting.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at))
        for key in keys:
            places.append((at, key))
            if isinstance(at[key], (dict, list)):
                waiting.append(at[key])
    if not places:
        return draw(_JUNK)
    at, key = draw(st.sampled_from(places))
    other, source = draw(st.sampled_from(places))
    action = draw(st.sampled_from(["replace", "drop", "rename", "copy"]))
    if action == "drop":
        del at[key]
    elif action == "rename" and isinstance(at, dict):
        at[str(key)[:-1] + "x"] = at.pop(key)
    else:
        at[key] = copy.deepcopy(other[source]) if action == "copy" else draw(_JUNK)
    return document


SEEDS: dict[str, Document] = {
    "small": hardware_to_document(SMALL),
    **{name: hardware_to_document(chip) for name, chip in SHIPPED.items()},
}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_mutation_raises_anything_but_hardware_error(data: st.DataObject) -> None:
    document: Any = copy.deepcopy(SEEDS[data.draw(st.sampled_from(sorted(SEEDS)))])
    for _ in range(data.draw(st.integers(1, 4))):
        if not isinstance(document, (dict, list)):
            break
        document = mutate(document, data.draw)
    findings = check_hardware_document(document, OPS)
    assert all(str(f).startswith("$") for f in findings)
    if not findings:
        hardware_hash(hardware_from_document(document, "", OPS))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_text_raises_anything_but_hardware_error(tmp_path: Path, data: st.DataObject) -> None:
    text = json.dumps(hardware_to_document(SMALL))
    at = data.draw(st.integers(0, len(text)))
    until = data.draw(st.integers(at, min(len(text), at + 20)))
    path = tmp_path / "chip.json"
    path.write_bytes(text[:at].encode() + data.draw(st.binary(max_size=6)) + text[until:].encode())
    try:
        chip = load_hardware(path)
    except HardwareError:
        return
    assert isinstance(chip, Hardware)
