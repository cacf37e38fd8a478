"""What is wrong with one signature of a hardware document."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, get_args

from hago.hardware_finding import Document, Finding, Path, any_of, figures, known_name, show
from hago.numerics import BiasAt, Order
from hago.schemes import SMALLEST_SCALE
from hago.types import DTYPES, DType

DEFAULT_MIN_BITS: Final = 4
#: What only nodes that compute in integers have.
_INTEGER_KEYS: Final = ("accumulator", "requantize_at", "fixed_out")
#: What only integer operands have.
_BITS_KEYS: Final = ("min_bits", "max_bits")
#: Every integer of so many bits, times a scale, is one rounding in float32.
_WIDEST_WEIGHT: Final = 16


def check_signature(path: Path, body: Document) -> Iterator[Finding]:
    """Every mistake in a signature, whatever ops list it."""
    yield from figures(path, {k: v for k, v in body.items() if not isinstance(v, (dict, list))})
    listed = [((*path, "in", i), n) for i, n in enumerate(body["in"])] + [((*path, "out"), body["out"])]
    register = body.get("accumulator", {}).get("dtype", body["out"])
    if "accumulator" in body:
        listed.append(((*path, "accumulator", "dtype"), register))
    unknown = [f for where, name in listed for f in known_name(where, name, DTYPES, "dtype")]
    yield from unknown
    if unknown:
        return
    operands, out = [DTYPES[n] for n in body["in"]], DTYPES[body["out"]]
    integers = [d for d in operands if d.is_int]
    if out.is_int and len(integers) == len(operands):
        yield from _integer_signature(path, body, operands, out, DTYPES[register])
    elif not out.is_int and len(integers) < min(2, len(operands)):
        yield from _float_signature(path, body, integers)
    else:
        text = f"mixes integer and float dtypes: {any_of(body['in'])} -> {out}; expected two signatures"
        yield Finding(path, f"{text}, or floats with one integer operand, the weight")


def _float_signature(path: Path, body: Document, weight: list[DType]) -> Iterator[Finding]:
    """
    Args:
        weight: the integer operand, where there is one.
    """
    refused = _INTEGER_KEYS if weight else (*_INTEGER_KEYS, *_BITS_KEYS)
    for key in (k for k in refused if k in body):
        what = "one that computes in float" if weight else "a float signature"
        yield Finding((*path, key), f"got {show(body[key])}; {what} has none: remove it")
    for dtype in weight:
        if dtype.bits > _WIDEST_WEIGHT:
            text = f"got {show(dtype.name)}; expected at most {_WIDEST_WEIGHT} bits of a weight whose node is float"
            yield Finding((*path, "in", body["in"].index(dtype.name)), text)
        yield from _limits(path, body, [dtype])


def _integer_signature(
    path: Path, body: Document, operands: list[DType], out: DType, register: DType
) -> Iterator[Finding]:
    widest = max(d.bits for d in operands)
    where = (*path, "accumulator", "dtype") if "accumulator" in body else (*path, "out")
    if not register.is_int:
        yield Finding(where, f"got {show(register.name)}; expected an integer dtype, as the operands are")
    elif register.bits < widest:
        yield Finding(where, f"got {show(register.name)}; expected at least an operand's {widest} bits")
    elif body.get("requantize_at", "edge") == "edge" and out != register:
        text = f"got {show(out.name)}; expected {register}, since the node emits its accumulator"
        yield Finding((*path, "out"), f"{text} (or state requantize_at: output)")
    yield from _order((*path, "accumulator"), body.get("accumulator", {}))
    yield from _fixed_out((*path, "fixed_out"), body, out)
    yield from _limits(path, body, operands)


def _order(path: Path, register: Document) -> Iterator[Finding]:
    """The order of additions is stated where every addition saturates, and nowhere else."""
    each = register.get("overflow") == "saturate_each"
    for key, known in (("order", get_args(Order)), ("bias", get_args(BiasAt))):
        if each and key not in register:
            text = f"the key is missing; with saturate_each expected one of {any_of(known)}"
            yield Finding((*path, key), text)
        elif not each and key in register:
            text = f"got {show(register[key])}; belongs to saturate_each, got {register['overflow']}: remove it"
            yield Finding((*path, key), text)


def _limits(path: Path, body: Document, operands: list[DType]) -> Iterator[Finding]:
    """Of the bits that operands may be given."""
    widest, narrowest = max(d.bits for d in operands), min(d.bits for d in operands)
    low, high = body.get("min_bits", DEFAULT_MIN_BITS), body.get("max_bits", 64)
    if low > high:
        yield Finding((*path, "max_bits"), f"got {high}; expected at least min_bits, {low}")
    if low > narrowest:
        text = f"got {low}{'' if 'min_bits' in body else ' (the default)'}; expected at most {narrowest}"
        yield Finding((*path, "min_bits"), f"{text}, the bits of an operand")
    if "max_bits" in body and high > widest:
        yield Finding((*path, "max_bits"), f"got {high}; expected at most {widest}, as no operand holds more")


def _fixed_out(path: Path, body: Document, out: DType) -> Iterator[Finding]:
    fixed = body.get("fixed_out")
    if fixed is None:
        return
    scale, zero = float(fixed["scale"]), fixed["zero_point"]
    if body.get("requantize_at") != "output":
        yield Finding(path, "the node emits its accumulator; expected requantize_at: output")
    if struct.unpack("f", struct.pack("f", scale))[0] != scale or scale < SMALLEST_SCALE:
        text = f"got {fixed['scale']}; expected a number that float32 holds exactly, at least {SMALLEST_SCALE:g}"
        yield Finding((*path, "scale"), text)
    if not out.min <= zero <= out.max:
        yield Finding((*path, "zero_point"), f"got {zero}; expected an integer of {out}, {out.min} to {out.max}")
