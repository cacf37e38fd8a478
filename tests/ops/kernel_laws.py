"""The laws of an integer form, each a function of a Case that asserts: carriers, scales, bounds, parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from hago.arithmetic.numerics import Order
from hago.ops._rule import Attrs, IntegerForm, Operand

from .one_op import Case


# ---------------------------------------------------------------- drawing
def integers(case: Case, seed: int, largest: int = 127) -> list[Tensor]:
    """Centered integers for every slot, int64; indices for plain slots."""
    generator = torch.Generator().manual_seed(seed)
    values = []
    for slot, shape in enumerate(case.shapes):
        const = case.consts.get(slot)
        if case.kind(slot) == "plain":
            rows = case.shapes[0][0]
            values.append(torch.randint(0, rows, shape, generator=generator) if const is None else const)
        else:
            values.append(torch.randint(-largest, largest + 1, shape, generator=generator))
    return values


def carried(case: Case, values: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [v if case.kind(s) == "plain" else v.to(dtype) for s, v in enumerate(values)]


def legal_scales(case: Case, varying: int | None, seed: int = 0) -> list[Tensor]:
    """A scale per slot: what each kind of slot allows, and 1 for bias and plain ones.

    Args:
        varying: the axis that the scale of a weight, or of a followed input, varies along.
    """
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.2 + 0.01
        return drawn.to(torch.float32).to(torch.float64)

    common, weight = some(), case.form.weight
    found = []
    for slot, shape in enumerate(case.shapes):
        kind = case.kind(slot)
        per_axis = varying is not None and (
            kind == "follow" if weight is None else weight.slot == slot and slot in case.consts
        )
        if kind in ("bias", "plain"):
            found.append(torch.ones((), dtype=torch.float64))
        elif kind == "common":
            found.append(common)
        elif per_axis:
            assert varying is not None
            axis = varying % len(shape)
            found.append(some(*(size if a == axis else 1 for a, size in enumerate(shape))))
        else:
            found.append(some())
    return found


def varying_axes(form: IntegerForm) -> list[int | None]:
    """Along which axes the scales of this form may vary; None for per-tensor scales."""
    crossing: dict[str, list[int | None]] = {"none": [], "axis1": [1], "all": [1, -1]}
    along = [] if form.weight is None else [form.weight.axis]
    return [None, *along, *crossing[form.accepts_per_channel]]


# ---------------------------------------------------------------- laws
def check_carriers(case: Case) -> None:
    """float32, float64 and int64 give the same integers, each in its own dtype."""
    values = integers(case, seed=1)
    attrs = case.form.attrs(case.attrs, legal_scales(case, None))
    found = []
    for dtype in (torch.float32, torch.float64, torch.int64):
        out = case.rule.compute_int(attrs, *carried(case, values, dtype))
        assert out.dtype == dtype
        found.append(out.to(torch.int64))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


def check_scale(case: Case, varying: int | None) -> None:
    """The op on real values is the op on integers times the scale; limits round to half a quantum."""
    scales = legal_scales(case, varying)
    out_scale = case.form.scale(case.attrs, scales)
    values = carried(case, integers(case, seed=2), torch.float64)
    real = []
    for slot, (value, scale) in enumerate(zip(values, scales, strict=True)):
        if case.kind(slot) == "bias":
            scale = out_scale.flatten()
        real.append(value if case.kind(slot) == "plain" else value * scale)
    expected = case.rule.compute(case.attrs, *real)
    attrs = case.form.attrs(case.attrs, scales)
    got = case.rule.compute_int(attrs, *values) * out_scale
    quanta = 1e-9 if attrs is case.attrs else 0.5 + 1e-9
    assert got.shape == expected.shape
    assert bool(((got - expected).abs() <= out_scale * quanta + expected.abs() * 1e-12).all())


def check_addends(case: Case) -> None:
    """What is added for every entry of the output, with its bias, is the op's result there, in either order."""
    addends = case.form.addends
    assert addends is not None and addends.terms is not None
    values = integers(case, seed=3)
    attrs = case.form.attrs(case.attrs, legal_scales(case, None))
    expected = case.rule.compute_int(attrs, *values)
    index = torch.nonzero(torch.ones(expected.shape)).unbind(1)
    found = [addends.terms(attrs, values, order)(index) for order in get_args(Order)]
    for terms in found:
        assert terms.shape[0] == expected.numel()
        total = terms.sum(1)
        if len(values) > 2:
            bias = values[2].flatten()
            total = total + bias.expand(expected.shape[addends.bias_axis])[index[addends.bias_axis]]
        assert total.equal(expected.flatten())
    one, other = (terms.sort(1).values for terms in found)
    assert one.equal(other)


def check_windows(case: Case) -> None:
    """What a layer's windows hold, times its weights, adds up to its output without the bias."""
    addends = case.form.addends
    assert addends is not None and addends.windows_at is not None
    x, w, *_ = values = integers(case, seed=3)
    expected = case.rule.compute_int(case.attrs, x, w, *(torch.zeros_like(v) for v in values[2:]))
    by_channel = expected.movedim(addends.bias_axis, -1)
    index = torch.nonzero(torch.ones(by_channel.shape[:-1])).unbind(1)
    of = addends.windows_at(case.attrs, x.shape, w, index)
    windows = of(x)
    assert of(3 * x).equal(3 * windows)  # of any value of this shape
    weights = w.movedim(1, -1).reshape(len(windows), -1, windows.shape[2])
    products = (windows.unsqueeze(2) * weights.unsqueeze(1)).sum(3)  # (groups, places, outputs of a group)
    assert products.transpose(0, 1).reshape(by_channel.shape).equal(by_channel)


def operands(case: Case, values: Sequence[Tensor]) -> list[Operand]:
    """What is known of the operands: constants wholly, others by their largest magnitude."""
    found = []
    for slot, value in enumerate(values):
        plain = case.kind(slot) == "plain"
        largest = torch.zeros((), dtype=torch.float64) if plain else value.abs().max().to(torch.float64)
        known = value if slot in case.consts and not plain else None
        found.append(Operand(known, largest, case.at_batch_1(slot)))
    return found


def free_slots(case: Case) -> list[int]:
    """Slots that an input can fill."""
    return [s for s in range(len(case.shapes)) if s not in case.consts and case.kind(s) != "plain"]


def extreme(case: Case, values: Sequence[Tensor], signs: Mapping[int, Tensor]) -> list[Tensor]:
    """The values with every free one at plus or minus its largest."""
    found = carried(case, values, torch.float64)
    for slot, sign in signs.items():
        found[slot] = torch.where(sign < 0, -1.0, 1.0).to(torch.float64) * values[slot].abs().max()
    return found


def pushed(
    case: Case, values: Sequence[Tensor], attrs: Attrs, start: Mapping[int, Tensor], position: int
) -> Iterator[Tensor]:
    """Outputs for extreme inputs whose signs follow the slopes of the output at `position`."""
    if not start:
        return  # nothing but constants
    leaves = extreme(case, values, start)
    for slot in start:
        leaves[slot].requires_grad_()
    out = case.rule.compute_int(attrs, *leaves).flatten()[position]
    slopes = torch.autograd.grad(out, [leaves[s] for s in start])
    for up in (1, -1):
        signs = {s: slope * up for s, slope in zip(start, slopes, strict=True)}
        yield case.rule.compute_int(attrs, *extreme(case, values, signs))


def check_bound(case: Case) -> None:
    """No input, however unlucky, gets past the bound."""
    values = integers(case, seed=3)
    attrs = case.form.attrs(case.attrs, legal_scales(case, None))
    bound = case.form.bound(attrs, operands(case, values))
    outputs = [case.rule.compute_int(attrs, *carried(case, values, torch.float64))]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        start = {s: torch.randn(case.shapes[s], generator=generator) + (seed == 0) * 9 for s in free_slots(case)}
        outputs.append(case.rule.compute_int(attrs, *extreme(case, values, start)))
        for position in {0, outputs[-1].numel() // 2, int(outputs[-1].abs().argmax())}:
            outputs += pushed(case, values, attrs, start, position)
    for out in outputs:
        assert torch.broadcast_shapes(out.shape, bound.shape) == out.shape
        assert bool((out.abs() <= bound).all())


def check_bound_is_reached(case: Case) -> None:
    """Where the weights are known, some input reaches the bound: it is the smallest there is."""
    values = integers(case, seed=3)
    attrs = case.form.attrs(case.attrs, legal_scales(case, None))
    bound = case.form.bound(attrs, operands(case, values))
    start = {s: torch.ones(case.shapes[s]) for s in free_slots(case)}
    all_positive = [v.abs() for v in extreme(case, values, start)]
    most = case.rule.compute_int(attrs, *all_positive)
    reached = list(pushed(case, values, attrs, start, int(most.argmax())))
    assert max(float(o.abs().max()) for o in reached) == float(bound.max())


def check_split(case: Case, parts: int) -> None:
    """Parts of the sum over K add up to the whole, and the bias is added once."""
    values = integers(case, seed=4)
    assert case.form.split is not None
    chunks = case.form.split(case.attrs, values, parts)
    whole = case.rule.compute_int(case.attrs, *values)
    assert torch.equal(sum(case.rule.compute_int(case.attrs, *c) for c in chunks), whole)  # type: ignore[arg-type]


def check_hull(case: Case) -> None:
    """An op that keeps the default bound gives nothing but values between its inputs and 0."""
    values = integers(case, seed=5, largest=40)
    shifted = [v if case.kind(s) == "plain" else v + 50 for s, v in enumerate(values)]
    attrs = case.form.attrs(case.attrs, legal_scales(case, None))
    for drawn in (values, shifted):
        moved = [v for s, v in enumerate(drawn) if case.kind(s) != "plain"]
        low, high = min(int(v.min()) for v in moved), max(int(v.max()) for v in moved)
        out = case.rule.compute_int(attrs, *drawn)
        assert min(low, 0) <= int(out.min()) and int(out.max()) <= max(high, 0)
