"""Checks of hardware documents, which report all mistakes together: those of structure, then those of meaning.

A `Finding` names the JSON path, what was got and what is expected. Parts whose structure is wrong are left out of the
checks of meaning, so that a mistake is reported once; everything else is still checked. `hardware.file` calls
`check_hardware_document` for every file that it reads or writes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, get_args

from hago.arithmetic.multipliers import MULTIPLIERS
from hago.arithmetic.numerics import OVERFLOWS, BiasAt, Order
from hago.arithmetic.rounding import ROUNDINGS
from hago.arithmetic.schemes import SCHEMES, SMALLEST_SCALE, TWO_SIDED
from hago.arithmetic.types import DTYPES, DType
from hago.errors import did_you_mean
from hago.hardware.common_ops import foreign_op
from hago.hardware.hardware import DEFAULT_MAX_BITS, DEFAULT_MIN_BITS, GROUP_OVERFLOWS, MOST_BITS, MOST_TABLE_BITS
from hago.ops import COMMON_SUM_BITS, IntegerForm, OpRule, Ops, Weight, aliases

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

Path = tuple[str | int, ...]
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake: its JSON path, and what was got and expected."""

    path: Path
    text: str

    def __str__(self) -> str:
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path)
        return f"${where}: {self.text}"


def show(value: Any) -> str:
    """A value as JSON text, shortened if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def comma_list(names: Iterable[Any]) -> str:
    """The names, separated by commas."""
    return ", ".join(map(str, names))


#: How people call scales that are powers of two.
_POWER_OF_TWO: Final = re.compile(r"(po|pow|powers?)(_?of)?_?(2|two)", re.IGNORECASE)


def _advice(got: str, known: Iterable[str]) -> str:
    """What is meant by a name that is unknown, as a sentence; empty where nothing is close to it."""
    if _POWER_OF_TWO.search(got):
        return (
            " Scales that are powers of two are those of a chip that requantizes by shifts alone: "
            '"requantize": {"form": "shift"}, and the scheme "hago" of activation and weight'
        )
    return did_you_mean(got, known)


def known_name(path: Path, got: str, known: Iterable[str], what: str) -> Iterator[Finding]:
    """The finding that a name is unknown, if it is."""
    known = list(known)
    if got not in known:
        text = f"unknown {what} {show(got)}; expected one of {comma_list(known)}.{_advice(got, known)}"
        yield Finding(path, text)


def nan_findings(path: Path, values: Mapping[str, Any]) -> Iterator[Finding]:
    """A finding for every value that is NaN."""
    for key, value in values.items():
        if isinstance(value, float) and value != value:
            yield Finding((*path, key), "got NaN; expected a number")


# ---------------------------------------------------------------- one signature
def _register(body: Document) -> DType | None:
    """The dtype of a signature's accumulator, given or by default; None where no dtype has that name."""
    return DTYPES.get(body.get("accumulator", {}).get("dtype", body["out"]))


#: The keys of signatures that compute in integers.
_INTEGER_KEYS: Final = ("accumulator", "requantize_at", "fixed_out")
#: The keys of signatures with an integer weight.
_WEIGHT_KEYS: Final = ("granularity",)
#: The most bits of a weight whose groups have multipliers.
_WIDEST_IN_GROUPS: Final = 8
#: The keys of signatures with integer operands.
_BITS_KEYS: Final = ("min_bits", "max_bits")
#: The most bits of the integer weight of a float node: float32 holds its integers, so dequantizing rounds only once.
_WIDEST_WEIGHT: Final = 16
#: The slot of the bias in ops with weights.
_BIAS: Final = 2


def check_signature(path: Path, body: Document) -> Iterator[Finding]:
    """The mistakes in a signature that do not depend on the ops that list it."""
    yield from nan_findings(path, {k: v for k, v in body.items() if not isinstance(v, (dict, list))})
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
        text = f"mixes integer and float dtypes: {comma_list(body['in'])} -> {out}; expected two signatures"
        yield Finding(path, f"{text}, or floats with one integer operand, the weight")


def _float_signature(path: Path, body: Document, weight: list[DType]) -> Iterator[Finding]:
    """The mistakes in a signature that computes in float.

    Args:
        weight: the dtype of the integer operand; empty if there is none.
    """
    refused = _INTEGER_KEYS if weight else (*_INTEGER_KEYS, *_BITS_KEYS, *_WEIGHT_KEYS)
    for key in (k for k in refused if k in body):
        what = "one that computes in float" if weight else "a float signature"
        yield Finding((*path, key), f"got {show(body[key])}; {what} has none: remove it")
    for dtype in weight:
        if dtype.bits > _WIDEST_WEIGHT:
            text = f"got {show(dtype.name)}; expected at most {_WIDEST_WEIGHT} bits of a weight whose node is float"
            yield Finding((*path, "in", body["in"].index(dtype.name)), text)
        yield from _limits(path, body, [dtype])
        for key in (k for k in ("multiplier_bits", "partial") if k in body.get("granularity", {})):
            text = (
                f"got {show(body['granularity'][key])}; the scales of groups are floats where the op computes in float"
            )
            yield Finding((*path, "granularity", key), f"{text}: remove it")


def _integer_signature(
    path: Path, body: Document, operands: list[DType], out: DType, register: DType
) -> Iterator[Finding]:
    widest = max(d.bits for d in operands)
    yield from _groups(path, body, operands, register)
    where = (*path, "accumulator", "dtype") if "accumulator" in body else (*path, "out")
    if not register.is_int:
        yield Finding(where, f"got {show(register.name)}; expected an integer dtype, as the operands are")
    elif register.bits < widest:
        yield Finding(
            where, f"got {show(register.name)}; expected at least the {widest} bits of {_name_of(operands, widest)}"
        )
    elif body.get("requantize_at", "edge") == "edge" and out != register:
        text = f"got {show(out.name)}; expected {register}, since the node emits its accumulator"
        yield Finding((*path, "out"), f"{text} (or state requantize_at: output)")
    yield from _order((*path, "accumulator"), body.get("accumulator", {}))
    yield from _fixed_out((*path, "fixed_out"), body, out)
    yield from _limits(path, body, operands)


def _groups(path: Path, body: Document, operands: list[DType], register: DType) -> Iterator[Finding]:
    """The mistakes in the groups of a weight that is multiplied as integers."""
    if "granularity" not in body:
        return
    granularity, where = body["granularity"], (*path, "granularity")
    if "multiplier_bits" not in granularity:
        text = "the key is missing; the sum of a group of integers is multiplied by an integer of so many bits"
        yield Finding((*where, "multiplier_bits"), text)
    overflow = body.get("accumulator", {}).get("overflow", "wrap")
    if overflow not in GROUP_OVERFLOWS:
        text = f"got {show(overflow)}; expected {' or '.join(GROUP_OVERFLOWS)} with groups of weights"
        yield Finding((*path, "accumulator", "overflow"), text)
    if "partial" in granularity:
        unknown = [*known_name((*where, "partial"), granularity["partial"], DTYPES, "dtype")]
        yield from unknown
        partial = None if unknown else DTYPES[granularity["partial"]]
        if partial is not None and (partial.kind != "int" or (register.is_int and partial.bits > register.bits)):
            text = f"got {show(partial.name)}; expected a signed integer dtype of at most the bits of {register}"
            yield Finding((*where, "partial"), text)


def _name_of(operands: list[DType], bits: int) -> str:
    """The first operand that has these bits, in words."""
    slot = next(i for i, dtype in enumerate(operands) if dtype.bits == bits)
    return f"the operand in[{slot}]{', of a layer the bias' if slot == _BIAS else ''}"


def _order(path: Path, register: Document) -> Iterator[Finding]:
    """The order of additions must be given if every addition saturates, and only then."""
    each = "overflow" in register and OVERFLOWS[register["overflow"]].at_every_addition
    for key, known in (("order", get_args(Order)), ("bias", get_args(BiasAt))):
        if each and key not in register:
            text = f"the key is missing; with saturate_each expected one of {comma_list(known)}"
            yield Finding((*path, key), text)
        elif not each and key in register:
            text = f"got {show(register[key])}; belongs to saturate_each, got {register['overflow']}: remove it"
            yield Finding((*path, key), text)


def _limits(path: Path, body: Document, operands: list[DType]) -> Iterator[Finding]:
    """The mistakes in the bits that a search may choose for operands."""
    widest, narrowest = max(d.bits for d in operands), min(d.bits for d in operands)
    low, high = body.get("min_bits", DEFAULT_MIN_BITS), body.get("max_bits", DEFAULT_MAX_BITS)
    if low > high:
        yield Finding((*path, "max_bits"), f"got {high}; expected at least min_bits, {low}")
    if low > narrowest:
        text = f"got {low}{'' if 'min_bits' in body else ' (the default)'}; expected at most {narrowest}"
        yield Finding((*path, "min_bits"), f"{text}, the bits of an operand")
    if "max_bits" in body and high > widest:
        yield Finding((*path, "max_bits"), f"got {high}; expected at most {widest}, as no operand holds more")
    elif "max_bits" in body and high > MOST_BITS:
        text = f"got {high}; expected at most {MOST_BITS}, since hago simulates integers in float64"
        yield Finding((*path, "max_bits"), text)


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


# ---------------------------------------------------------------- the document

#: The most mistakes of structure that are reported.
MOST_FOUND: Final = 1000


def check_hardware_document(document: Any, known_ops: Ops) -> tuple[Finding, ...]:
    """Check a hardware document.

    Args:
        document: parsed JSON.
        known_ops: the ops that it may list.

    Returns:
        All mistakes; empty for a document of which hardware can be made. If MOST_FOUND mistakes of structure are found,
        the search for more ends and the meaning is not checked.
    """
    violations = itertools.islice(_validator().iter_errors(document), MOST_FOUND)
    errors = sorted(violations, key=lambda e: [str(p) for p in e.absolute_path])
    shape = [(e.validator, f) for e in errors for f in _shape_findings(e)]
    if len(errors) == MOST_FOUND:
        return tuple(dict.fromkeys(f for _, f in shape))
    # an unknown key leaves the rest of its object readable
    broken = [f.path for keyword, f in shape if keyword != "additionalProperties"]
    sound = _without(document, broken)
    meaning = [*_meaning(sound), *_references(document, sound, known_ops)]
    return tuple(dict.fromkeys([*(f for _, f in shape), *meaning]))


# ---------------------------------------------------------------- structure
@functools.cache
def _validator() -> Draft202012Validator:
    from jsonschema import Draft202012Validator

    text = (resources.files("hago.serialization") / "schemas" / "hardware.schema.json").read_text("utf-8")
    return Draft202012Validator(json.loads(text))


#: What each keyword of JSON Schema expects, in words; {} is replaced by the keyword's value.
_EXPECTED: Final = {
    "const": "{}",
    "type": "a JSON {}",
    "minItems": "at least {} entry",
    "minProperties": "at least {} entry",
    "minLength": "at least {} character",
    "uniqueItems": "each entry once",
    "minimum": "at least {}",
    "maximum": "at most {}",
    "exclusiveMinimum": "more than {}",
    "pattern": "a name that matches {}",
}


def _shape_findings(error: ValidationError) -> Iterator[Finding]:
    path, got = tuple(error.absolute_path), error.instance
    keyword, wanted = error.validator, error.validator_value
    if keyword == "additionalProperties":
        known = error.schema["properties"]
        for key in (k for k in got if k not in known):
            yield Finding((*path, key), f"unknown key; known: {comma_list(known)}.{_advice(key, known)}")
    elif keyword == "required":
        for key in (k for k in wanted if k not in got):
            yield Finding((*path, key), "the key is missing")
    elif keyword == "enum":
        advice = _advice(got, wanted) if isinstance(got, str) else ""
        yield Finding(path, f"got {show(got)}; expected one of {comma_list(wanted)}.{advice}")
    else:
        expected = _EXPECTED[str(keyword)].format(show(wanted) if keyword == "const" else wanted)
        yield Finding(path, f"got {show(got)}; expected {expected}")


def _without(document: Any, broken: Iterable[Path]) -> Document:
    """The document without its broken parts, each an entry of signatures or ops, or else a whole section."""
    if not isinstance(document, dict):
        return {}
    sound = {k: dict(v) if isinstance(v, dict) else v for k, v in document.items()}
    for path in broken:
        entries = sound.get(path[0]) if path else None
        if len(path) > 1 and path[0] in ("signatures", "ops") and isinstance(entries, dict):
            entries.pop(path[1], None)
        elif path:
            sound.pop(str(path[0]), None)
    return sound


# ---------------------------------------------------------------- meaning
def _meaning(document: Document) -> Iterator[Finding]:
    for part in ("activation", "weight"):
        if part in document:
            yield from known_name((part, "scheme"), document[part]["scheme"], SCHEMES, "scheme")
    if "rounding" in document:
        yield from known_name(("rounding",), document["rounding"], ROUNDINGS, "rounding")
    yield from _requantize(document)
    yield from _products_with_multipliers(document)
    yield from _scales_of_shifts(document)
    yield from nan_findings(("cost",), document.get("cost", {}))
    for name, body in document.get("signatures", {}).items():
        yield from check_signature(("signatures", name), body)
    scheme = document.get("weight", {}).get("scheme")
    if scheme in TWO_SIDED and any("multiplier_bits" in s.get("granularity", {}) for s in _signatures(document)):
        text = f"got {show(scheme)}; expected a scheme without zero points where groups of weights have multipliers"
        yield Finding(("weight", "scheme"), text)


def _signatures(document: Document) -> Iterator[Document]:
    yield from document.get("signatures", {}).values()


def _requantize(document: Document) -> Iterator[Finding]:
    how = document.get("requantize", {})
    form = how.get("form")
    for key in ("multiplier_bits", "two_stage", "search", "shift_rounding", "wide"):
        if key in how and form != "multiplier_shift":
            yield Finding(("requantize", key), f"belongs to the form multiplier_shift; got the form {form}")
    if how.get("two_stage") and how.get("multiplier_bits", 31) != 31:
        yield Finding(("requantize", "two_stage"), "needs multiplier_bits 31: stage one divides by 2**31")
    yield from known_name(("requantize", "shift_rounding"), how.get("shift_rounding", "floor"), ROUNDINGS, "rounding")
    yield from known_name(("requantize", "search"), how.get("search", "nearest"), MULTIPLIERS, "search of a multiplier")
    if how.get("search") == "reduced" and how.get("multiplier_bits", 31) != 15:
        yield Finding(("requantize", "search"), "reduced has multiplier_bits 15")
    for part in ("activation", "weight"):
        scheme = document.get(part, {}).get("scheme", "hago")
        if form == "shift" and scheme in SCHEMES and scheme != "hago":
            text = f"got {show(scheme)}; expected hago: a shift moves between powers of two only"
            yield Finding((part, "scheme"), text)


def _scales_of_shifts(document: Document) -> Iterator[Finding]:
    """Fixed scales that a chip that requantizes by shifts cannot reach."""
    if document.get("requantize", {}).get("form") != "shift":
        return
    for name, body in document.get("signatures", {}).items():
        scale = body.get("fixed_out", {}).get("scale", 1)
        if math.frexp(scale)[0] != 0.5:
            text = f"got {scale}; expected a power of two, since the chip requantizes by shifts"
            yield Finding(("signatures", name, "fixed_out", "scale"), text)


def _products_with_multipliers(document: Document) -> Iterator[Finding]:
    """Registers whose integers times a multiplier exceed the 64 bits in which these are computed."""
    how = document.get("requantize", {})
    if how.get("form") != "multiplier_shift" or "wide" in how:
        return
    bits = int(how.get("multiplier_bits", 31))
    for name, body in document.get("signatures", {}).items():
        path, register = ("accumulator", "dtype") if "accumulator" in body else ("out",), _register(body)
        if register is not None and register.is_int and register.bits + bits > 63:
            most = 63 - register.bits
            fewer = f"multiplier_bits of at most {most} in requantize, " if most > 1 else ""
            text = f"got {show(register.name)}; its products with multipliers of {bits} bits exceed 64 bits; expected"
            yield Finding(("signatures", name, *path), f"{text} {fewer}wide: reduced there, or fewer bits")


# ---------------------------------------------------------------- ops and what they refer to
def _references(document: Any, sound: Document, known_ops: Ops) -> Iterator[Finding]:
    """The mistakes in names of ops and signatures, and signatures that no op lists.

    Args:
        document: with its broken parts, since broken signatures have names, too.
        sound: the same without its broken parts.
    """
    names, listed = (document.get(k) if isinstance(document, dict) else None for k in ("signatures", "ops"))
    if not isinstance(names, dict) or not isinstance(listed, dict):
        return
    yield from _ops(sound, names, known_ops)
    used = [s for entry in listed.values() if isinstance(entry, list) for s in entry]
    for name in (n for n in names if n not in used):
        yield Finding(("signatures", name), "no op lists this signature; list it or remove it")


def _ops(sound: Document, names: Document, known_ops: Ops) -> Iterator[Finding]:
    spelled, signatures = aliases(known_ops), sound.get("signatures", {})
    spelling_of: dict[str, str] = {}
    for op, listed in sound.get("ops", {}).items():
        name = spelled.get(op, op)
        if name in spelling_of:
            yield Finding(("ops", op), f"lists {name} a second time, after {show(spelling_of[name])}; expected one")
        spelling_of.setdefault(name, op)
        if name not in known_ops:
            expected = f"expected one of {comma_list(known_ops)}.{did_you_mean(op, [*known_ops, *spelled])}"
            yield Finding(("ops", op), f"unknown op; {foreign_op(op, known_ops) or expected}")
        for index, signature in enumerate(listed):
            path = ("ops", op, index)
            yield from known_name(path, signature, names, "signature")
            if name in known_ops and signature in signatures:
                yield from _op_takes(path, name, signatures[signature], known_ops, sound.get("requantize", {}))
        if name in known_ops:
            integers = {s: signatures[s] for s in listed if s in signatures and _gives_integers(signatures[s])}
            yield from _one_form(("ops", op), integers)
            yield from _one_place(("ops", op), integers, known_ops[name])


def _op_takes(path: Path, op: str, signature: Document, known_ops: Ops, how: Document) -> Iterator[Finding]:
    rule, out, named = known_ops[op], DTYPES.get(signature["out"]), signature.get("form")
    if out is None:
        return
    if not out.is_int:
        yield from _weight_only(path, op, signature, rule)
        return
    if rule.integer is None and not rule.forms:
        yield Finding(path, f"hago has no integer form of {op}; expected a float signature")
    elif named not in rule.forms and (named is not None or rule.integer is None):
        known = f"it has {comma_list(rule.forms) or 'one, without a name'}"
        yield Finding(path, f"{op} has no form {show(named)}; {known}.{did_you_mean(named or '', rule.forms)}")
    elif (form := rule.integer if named is None else rule.forms[named]) is not None:
        yield from _form_takes(path, op, signature, form, how)
        yield from _knows_groups(path, op, signature, form.weight)


def _weight_only(path: Path, op: str, signature: Document, rule: OpRule) -> Iterator[Finding]:
    """The integer operand of a float signature must be the weight of the op."""
    integers = [slot for slot, n in enumerate(signature["in"]) if (d := DTYPES.get(n)) is not None and d.is_int]
    weight = rule.weight
    if integers and weight is None:
        yield Finding(path, f"hago knows no weight of {op}; expected a signature of floats alone, or of integers alone")
    elif weight is not None and integers not in ([], [weight.slot]):
        text = f"the weight of {op} is operand {weight.slot}; got an integer as operand {comma_list(integers)}"
        yield Finding(path, f"{text} of a float signature")
    else:
        yield from _knows_groups(path, op, signature, weight)


def _knows_groups(path: Path, op: str, signature: Document, weight: Weight | None) -> Iterator[Finding]:
    """The groups of a signature must be those of a weight that an op sums over."""
    if "granularity" not in signature:
        return
    if weight is None or not weight.sums_channels:
        text = f"got {show(signature['granularity'])}; hago knows no groups of the weight of {op}"
        yield Finding(path, f"{text}: they are those of linear layers and of convolutions that are not transposed")
        return
    stored = DTYPES.get(signature["in"][min(weight.slot, len(signature["in"]) - 1)])
    has_multipliers = "multiplier_bits" in signature["granularity"]
    if has_multipliers and stored is not None and (stored.kind != "int" or stored.bits > _WIDEST_IN_GROUPS):
        text = f"got {show(stored.name)}; expected signed integers of at most {_WIDEST_IN_GROUPS} bits"
        yield Finding(path, f"{text} of a weight whose groups have multipliers")


def _form_takes(path: Path, op: str, signature: Document, form: IntegerForm, how: Document) -> Iterator[Finding]:
    at_output = signature.get("requantize_at") == "output"
    if form.table and not at_output:
        yield Finding(path, f"{op} is looked up in a table; expected a signature with requantize_at: output")
    dtype = DTYPES.get(signature["in"][0])
    bits = 0 if dtype is None else min(dtype.bits, signature.get("max_bits", DEFAULT_MAX_BITS))
    if form.table and at_output and bits > MOST_TABLE_BITS:
        text = f"{op} is looked up in a table with an entry for every input; got inputs of {bits} bits, expected"
        yield Finding(path, f"{text} at most {MOST_TABLE_BITS}: set max_bits, or list a float signature")
    if form.requantizes_output and not at_output:
        text = f"the form {signature['form']} of {op} goes to the output's scale; expected requantize_at: output"
        yield Finding(path, text)
    overflow = OVERFLOWS[signature.get("accumulator", {}).get("overflow", "wrap")]
    expected = " or ".join(name for name, b in OVERFLOWS.items() if b.of_pair is None and not b.at_every_addition)
    if form.product is None and overflow.of_pair is not None:
        yield Finding(path, f"hago knows no pairs of products of {op}; expected {expected}")
    if overflow.at_every_addition and form.addends is None and not form.has_no_additions:
        named = "" if signature.get("form") is None else f" in the form {signature['form']}"
        yield Finding(path, f"hago knows no order of additions of {op}{named}; expected {expected}")
    register = _register(signature)
    if form.common is not None and register is not None and register.bits < COMMON_SUM_BITS:
        text = f"sums of the form {signature['form']} of {op} have {COMMON_SUM_BITS} bits; expected an accumulator that"
        yield Finding(path, f"{text} holds them, got {register}")
    if form.required_requantize is not None and how.get("form") not in (None, form.required_requantize):
        text = f"the form {signature['form']} of {op} goes with the requantize form {form.required_requantize}"
        yield Finding(path, f"{text}; got {how['form']}")


def _gives_integers(signature: Document) -> bool:
    out = DTYPES.get(signature["out"])
    return out is not None and out.is_int


def _one_form(path: Path, integers: Document) -> Iterator[Finding]:
    """All integer signatures of an op must have the same form."""
    named = list(dict.fromkeys(s.get("form") for s in integers.values()))
    if len(named) > 1:
        forms = comma_list(n or "none" for n in named)
        yield Finding(path, f"lists signatures of {len(named)} forms ({forms}); expected one form for the op")


def _one_place(path: Path, integers: Document, rule: OpRule) -> Iterator[Finding]:
    """All integer signatures of an op must requantize in the same place. Signatures of forms that must requantize at
    the output are checked by `_form_takes`."""
    forms = [rule.integer if (named := s.get("form")) is None else rule.forms.get(named) for s in integers.values()]
    if any(form is None or form.table or form.requantizes_output for form in forms):
        return
    places = {name: s.get("requantize_at", "edge") for name, s in integers.items()}
    if len(set(places.values())) > 1:
        got = comma_list(f"{name}: {at}" for name, at in places.items())
        text = f"lists signatures that requantize in two places ({got}); expected the same requantize_at in all"
        yield Finding(path, f"{text}: list those of one place only")
