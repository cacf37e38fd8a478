"""Random pieces of hardware: every kind of register, scheme, requantization and form that hago knows, by seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, get_args

from chips import Chip, has_groups, has_weight, narrowed, weight_only

from hago.arithmetic.numerics import BiasAt, Order, Requantize, RequantizeForm
from hago.arithmetic.rounding import ROUNDINGS
from hago.arithmetic.schemes import TWO_SIDED
from hago.arithmetic.types import INT16, INT32, dtype
from hago.hardware import Accumulator, Groups, Hardware, OpDesc
from hago.hardware.hardware import GROUP_OVERFLOWS
from hago.ops import OPS, IntegerForm

_FORMS: Final = get_args(RequantizeForm)


def random_hardware(seed: int) -> Hardware:
    """A chip that lists every op with an integer form; equal seeds give equal chips."""
    rng = random.Random(seed)
    how = _requantize(rng)
    schemes = ("hago",) if how.power_of_two else ("hago", "symmetric", "symmetric_full", "affine", "hago_affine")
    chip = Chip(
        operand=rng.choice(["int8", "int8", "uint8", "int16"]),
        register=rng.choice(["int16", "int24", "int32", "int32", "int64"]),
        overflow=rng.choice(["wrap", "wrap", "saturate_end"]),
        at=rng.choice(["edge", "output"]),
        scheme=rng.choice(schemes),
        weight_scheme=rng.choice(schemes),
        granularity=rng.choice(["per_tensor", "per_channel"]),
        requantize=how,
        floats=rng.random() < 0.7,
    )
    if chip.register == "int16" and chip.operand == "int16":
        chip = replace(chip, register="int32")
    hardware = chip.hardware(name=f"random_{seed}")
    ops = {**hardware.ops, **_with_pairs(rng, hardware), **_with_forms(rng, hardware, chip)}
    ops |= _with_additions(random.Random(f"additions {seed}"), ops)
    apart = random.Random(~seed)
    ops |= _with_stored_weights(apart, ops)
    ops |= _with_groups(random.Random(f"groups {seed}"), ops, chip.weight_scheme)
    ops |= _with_rescaled_sums(random.Random(f"rescaled {seed}"), ops, chip)
    ops = dict(_with_widths(apart, ops, chip.operand))
    if how.form == "multiplier_shift" and any(d.register.dtype.bits > 32 for descs in ops.values() for d in descs):
        how = replace(how, wide="reduced")
    return replace(hardware, ops=ops, requantize=how)


def _requantize(rng: random.Random) -> Requantize:
    form, rounding = rng.choice(_FORMS), rng.choice(sorted(ROUNDINGS))
    if form != "multiplier_shift":
        return Requantize(form, rounding)
    search = rng.choice(["nearest", "nearest", "reduced", "least_error"])
    bits = 15 if search == "reduced" else rng.choice([31, 31, 15, 7])
    return Requantize(
        form,
        rounding,
        multiplier_bits=bits,
        two_stage=search == "nearest" and bits == 31 and rng.random() < 0.5,
        search=search,
        shift_rounding=rng.choice([None, "half_up", rounding]),
        wide=rng.choice([None, "reduced"]),
    )


def _with_pairs(rng: random.Random, hardware: Hardware) -> Mapping[str, tuple[OpDesc, ...]]:
    """On some chips of bytes, matrix products whose neighbours are added in 16 bits first."""
    if rng.random() < 0.7 or hardware.ops["conv2d"][0].in_dtype(0).bits > 8:
        return {}
    register = Accumulator(INT32, rng.choice(["saturate_pairs", "wrap_pairs"]))
    found = {}
    for op, rule in OPS.items():
        if rule.integer is not None and rule.integer.product is not None:
            first, *rest = hardware.ops[op]
            out = first.out_dtype if first.requantize_at == "output" else INT32
            found[op] = (replace(first, out_dtypes=out, accumulator=register), *rest)
    return found


def _with_additions(rng: random.Random, ops: Mapping[str, Sequence[OpDesc]]) -> Mapping[str, tuple[OpDesc, ...]]:
    """On some chips, narrow registers that saturate at every addition, of all ops that add up or of some."""
    if rng.random() < 0.6:
        return {}
    share, order, bias = rng.choice([0.5, 1.0]), rng.choice(get_args(Order)), rng.choice(get_args(BiasAt))
    found = {}
    for op, descs in ops.items():
        form = OPS[op].integer
        if form is not None and form.addends is not None and rng.random() < share:
            found[op] = tuple(_saturating_each(d, order, bias) for d in descs)
    return found


def _saturating_each(desc: OpDesc, order: Order, bias: BiasAt) -> OpDesc:
    """A signature of integers with the narrowest register that is likely to saturate; others as they are."""
    if not desc.is_integer or desc.form is not None:
        return desc
    widest = max(d.bits for d in desc.in_dtypes)
    register = INT16 if widest <= 8 else dtype("int24") if widest <= 16 else desc.register.dtype
    out = desc.out_dtype if desc.requantize_at == "output" else register
    return replace(desc, out_dtypes=out, accumulator=Accumulator(register, "saturate_each", order, bias))


def _with_forms(rng: random.Random, hardware: Hardware, chip: Chip) -> Mapping[str, tuple[OpDesc, ...]]:
    """Some ops in a form of theirs; a form that ends at the output's scale has bytes on both sides."""
    found = {}
    for op, rule in OPS.items():
        possible = [n for n, f in rule.forms.items() if f.common is None and _fits(f, hardware, chip)]
        if rule.integer is None or not possible or rng.random() < 0.4:
            continue
        name = rng.choice(possible)
        at = "output" if rule.forms[name].requantizes_output else "edge"
        if rule.forms[name] is rule.integer:
            continue
        sums = Accumulator(INT32) if at == "output" else None
        desc = OpDesc(chip.operand, chip.operand, sums, at, min_bits=chip.min_bits, form=name)
        floats = tuple(d for d in hardware.ops[op] if not d.is_integer)
        found[op] = (desc, *floats)
    return found


def _with_stored_weights(rng: random.Random, ops: Mapping[str, Sequence[OpDesc]]) -> Mapping[str, tuple[OpDesc, ...]]:
    """On some chips, layers that compute in float with their weights as integers, somewhere in the order."""
    if rng.random() < 0.7:
        return {}
    found = {}
    for op in (n for n in ops if has_weight(OPS[n]) and rng.random() < 0.7):
        descs = list(ops[op])
        stored = rng.choice(["int4", "int4", "uint4", "int8", "uint8", "int3", "int16"])
        descs.insert(rng.randrange(len(descs) + 1), weight_only(stored, rng.choice([2, 4])))
        found[op] = tuple(descs)
    return found


def _with_groups(
    rng: random.Random, ops: Mapping[str, Sequence[OpDesc]], scheme: str
) -> Mapping[str, tuple[OpDesc, ...]]:
    """On some chips, scales for groups of the weights of layers, of those that compute in integers or of the others."""
    if rng.random() < 0.6:
        return {}
    size, bits, partial = rng.choice([2, 3, 8, 32]), rng.randint(2, 8), rng.choice([None, INT16, dtype("int24")])
    found = {}
    for op in (n for n in ops if has_groups(OPS[n]) and rng.random() < 0.8):
        found[op] = tuple(_in_groups(d, Groups(size), Groups(size, bits, partial), scheme) for d in ops[op])
    return found


def _with_rescaled_sums(
    rng: random.Random, ops: Mapping[str, Sequence[OpDesc]], chip: Chip
) -> Mapping[str, tuple[OpDesc, ...]]:
    """On some chips, sums whose narrow operands are rescaled inside the op, beside wide operands or without these."""
    if rng.random() < 0.7:
        return {}
    found = {}
    for op in (n for n in ops if "rescaled" in OPS[n].forms and rng.random() < 0.7):
        wide = ["int32", "int32"]
        operands = [[chip.operand] * 2, [chip.operand, wide[0]], [wide[0], chip.operand], wide]
        out, sums = ("int32", None) if chip.at == "edge" else (chip.operand, Accumulator(INT32))
        listed = operands if chip.at == "edge" and rng.random() < 0.7 else operands[:1]
        floats = (d for d in ops[op] if not d.is_integer)
        limits = [{"min_bits": chip.min_bits} | ({"max_bits": 23} if "int32" in ins else {}) for ins in listed]
        descs = (
            OpDesc(ins, out, sums, chip.at, form="rescaled", **limit) for ins, limit in zip(listed, limits, strict=True)
        )
        found[op] = (*descs, *floats)
    return found


def _in_groups(desc: OpDesc, alone: Groups, product: Groups, scheme: str) -> OpDesc:
    """A signature with groups, where it can have them; others as they are."""
    if desc.is_weight_only:
        return replace(desc, groups=alone)
    fits = desc.is_integer and desc.form is None and desc.register.overflow in GROUP_OVERFLOWS
    if not fits or scheme in TWO_SIDED or desc.in_dtype(1).kind != "int" or desc.in_dtype(1).bits > 8:
        return desc
    wide = product.partial is not None and product.partial.bits > desc.register.dtype.bits
    return replace(desc, groups=replace(product, partial=None) if wide else product)


def _with_widths(
    rng: random.Random, ops: Mapping[str, Sequence[OpDesc]], operand: str
) -> Mapping[str, Sequence[OpDesc]]:
    """On some chips, signatures of half as many bits for data or results, somewhere in the order."""
    if rng.random() < 0.6:
        return ops
    whole, half = dtype(operand), dtype({"int8": "int4", "uint8": "uint4", "int16": "int8"}[operand])
    found = {}
    for op, descs in ops.items():
        listed = list(descs)
        for desc in (n for d in descs if d.is_integer for n in narrowed(d, whole, half) if rng.random() < 0.5):
            listed.insert(rng.randrange(len(listed) + 1), desc)
        found[op] = tuple(listed)
    return found


def _fits(form: IntegerForm, hardware: Hardware, chip: Chip) -> bool:
    symmetric = dtype(chip.operand).signed and chip.scheme not in ("affine", "hago_affine")
    goes = form.required_requantize in (None, hardware.requantize.form)
    rectifier = form.slots[0] == "follow" and form.attrs_at is not None and not form.allows_early_clipping
    return goes and not hardware.requantize.power_of_two and (symmetric or not rectifier)
