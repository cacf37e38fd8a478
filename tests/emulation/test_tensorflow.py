"""TensorFlow's fake quantization: laws of the nudged range, the kernels and the gradients."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hago.emulation.tensorflow.fake_quantize import (
    BatchRange,
    FakeQuant,
    LastValueQuantize,
    MovingAvgQuantize,
    Schedule,
)
from hago.errors import HagoError

OPTIONS = st.builds(FakeQuant, st.integers(2, 16), st.booleans(), st.sampled_from(["2.15", "1.15"]))
ENDS = st.tuples(st.floats(-100, 100, width=32), st.floats(0.0078125, 100, width=32)).map(lambda p: (p[0], p[0] + p[1]))


def ends_of(pair: tuple[float, float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(pair[0]), torch.tensor(pair[1])


@given(OPTIONS, ENDS)
def test_zero_is_on_the_grid(options: FakeQuant, pair: tuple[float, float]) -> None:
    low, high = ends_of(pair)
    nudged_low, nudged_high, _, _ = options.nudge(low, high)
    assert nudged_low <= 0 <= nudged_high
    assert options.vars(torch.zeros(3), low, high).abs().max() <= 1e-6 * (high - low)


@given(OPTIONS, st.integers(-6, 6), st.data())
def test_exact_grids_round_half_up(options: FakeQuant, exponent: int, data: st.DataObject) -> None:
    """With a power-of-two scale everything is exact, so that fractions must agree, ties included."""
    zero = data.draw(st.integers(options.qmin, options.qmax))
    scale = Fraction(2) ** exponent
    low, high = (float((q - zero) * scale) for q in (options.qmin, options.qmax))
    halves = data.draw(st.lists(st.integers(-(2**17), 2**17), min_size=1, max_size=20))
    values = [float(h * scale / 2) for h in halves]
    expected = []
    for v in values:
        q = math.floor(Fraction(v) / scale + zero + Fraction(1, 2))
        expected.append(float((min(max(q, options.qmin), options.qmax) - zero) * scale))
    x = torch.tensor(values)
    channels = torch.full((len(values),), low), torch.full((len(values),), high)
    assert options.vars(x, torch.tensor(low), torch.tensor(high)).tolist() == expected
    assert options.args(x, low, high).tolist() == expected
    assert options.vars_per_channel(x, *channels).tolist() == expected


@given(OPTIONS, ENDS, st.lists(st.integers(-300, 300), min_size=1, max_size=12))
def test_gradients_go_to_the_value_or_to_an_end(
    options: FakeQuant, pair: tuple[float, float], values: list[int]
) -> None:
    """The gradient of every finite value goes to exactly one of x, low and high."""
    low, high = (t.requires_grad_() for t in ends_of(pair))
    x = torch.tensor([float(v) for v in values], requires_grad=True)
    grad = torch.arange(1.0, len(values) + 1)
    options.vars(x, low, high).backward(grad)
    assert x.grad is not None and low.grad is not None and high.grad is not None
    assert x.grad.sum() + low.grad + high.grad == grad.sum()
    nudged_low, nudged_high, _, _ = options.nudge(low.detach(), high.detach())
    inside = (x >= nudged_low) & (x <= nudged_high)
    assert torch.equal(x.grad, torch.where(inside, grad, 0.0))
    assert high.grad == grad[x > nudged_high].sum()


def test_zero_point_rounds_half_away() -> None:
    assert [t.item() for t in FakeQuant().nudge(torch.tensor(-0.5), torch.tensor(254.5))[:2]] == [-1.0, 254.0]


def test_channels_multiply_in_one_release_and_divide_in_the_other() -> None:
    low, high = torch.tensor([-1.37]), torch.tensor([0.77])
    x = (torch.arange(0, 255) + 0.5) * ((high - low) / 255) + FakeQuant().nudge(low, high)[0]
    new, old = FakeQuant(), FakeQuant(kernel="1.15")
    by_channel = [options.vars_per_channel(x[None], low, high, 0) for options in (new, old)]
    args = new.args(x, low.item(), high.item())
    assert torch.equal(by_channel[0][0], args) and torch.equal(by_channel[1][0], old.vars(x, low, high))
    assert not torch.equal(args, new.vars(x, low, high))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("kernel", ["2.15", "1.15"])
def test_channels_are_quantized_each_alone(kernel, axis: int) -> None:
    options = FakeQuant(4, kernel=kernel)
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    size = x.shape[axis]
    low, high = torch.linspace(-1, -0.1, size).requires_grad_(), torch.linspace(0, 2, size).requires_grad_()
    y = options.vars_per_channel(x, low, high, axis)
    y.sum().backward()
    assert low.grad is not None and high.grad is not None and x.grad is not None
    for i in range(size):
        part = x.detach().select(axis, i).clone().requires_grad_()
        one_low, one_high = low[i].detach().clone().requires_grad_(), high[i].detach().clone().requires_grad_()
        one = options.vars(part, one_low, one_high)
        if kernel == "2.15":
            one = options.args(part.detach(), one_low.item(), one_high.item())
        assert torch.allclose(one, y.select(axis, i), atol=1e-6)
        options.vars(part, one_low, one_high).sum().backward()
        assert one_low.grad == low.grad[i] and one_high.grad == high.grad[i]
        assert torch.equal(part.grad, x.grad.select(axis, i))


def test_kernels_differ_at_ties() -> None:
    """The four orders of operations differ from each other at ties."""
    differing = dict.fromkeys(itertools.combinations(range(4), 2), 0)
    for first, last in itertools.product([-1.37, -0.3, -5.1], [2.91, 0.77, 6.0]):
        low, high = torch.tensor(first), torch.tensor(last)
        scale = (high - low) / 255
        x = (torch.arange(0, 255) + 0.5) * scale + FakeQuant().nudge(low, high)[0]
        kernels = FakeQuant(), FakeQuant(kernel="1.15")
        outputs = [h.vars(x, low, high) for h in kernels] + [h.args(x, first, last) for h in kernels]
        steps = [torch.round(y / scale) for y in outputs]
        for i, j in differing:
            differing[i, j] += int((steps[i] != steps[j]).sum())
            assert float((steps[i] - steps[j]).abs().max()) <= 1
    assert all(differing.values())


@pytest.mark.parametrize("call", ["args", "vars"])
def test_half_precision_is_computed_in_float32(call: str) -> None:
    x = torch.tensor([0.3, -7.0], dtype=torch.float16)
    ends = (-6.0, 6.0) if call == "args" else (torch.tensor(-6.0), torch.tensor(6.0))
    y = getattr(FakeQuant(), call)(x, *ends)
    assert y.dtype == torch.float16
    assert torch.equal(y, getattr(FakeQuant(), call)(x.float(), *ends).half())


class TestObservers:
    def test_eval_uses_the_initial_range_and_never_updates(self) -> None:
        for kind in (LastValueQuantize, MovingAvgQuantize):
            module = kind(init_min=-1.0, init_max=1.0).eval()
            before = {k: v.clone() for k, v in module.state_dict().items()}
            assert module(torch.tensor([9.0])).item() == pytest.approx(1.0, abs=0.01)
            assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())

    @pytest.mark.parametrize("channels", [None, 3])
    def test_state_round_trips_into_eval(self, channels: int | None) -> None:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
        trained, fresh = MovingAvgQuantize(channels=channels), MovingAvgQuantize(channels=channels)
        trained(x)
        fresh.load_state_dict(trained.state_dict())
        assert torch.equal(fresh.eval()(x), trained.eval()(x))
        assert torch.equal(fresh.train()(2 * x), trained.train()(2 * x))

    def test_a_constant_range_is_kept_to_float32(self) -> None:
        module = MovingAvgQuantize()
        for _ in range(5):
            module(torch.tensor([-1.0, 3.0]))
            assert module.maximum.item() == pytest.approx(3.0, rel=2e-5)
        assert module.local_step.item() == 5

    def test_a_delay_updates_the_range_all_the_same(self) -> None:
        module = LastValueQuantize()
        x = torch.tensor([0.123, 2.0])
        assert torch.equal(module(x, quantize=False), x)
        assert module.maximum.item() == 2.0

    def test_the_range_takes_no_gradient_but_the_values_do(self) -> None:
        x = torch.tensor([-1.0, 0.2, 254.0], requires_grad=True)
        LastValueQuantize()(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [1, 1, 1]

    @given(st.lists(st.integers(-64, 64), min_size=1, max_size=8), st.integers(2, 8), st.booleans())
    def test_symmetric_ranges_hold_the_batch_and_zero(self, values: list[int], bits: int, narrow: bool) -> None:
        low, high = BatchRange(FakeQuant(bits, narrow), symmetric=True)(torch.tensor([float(v) for v in values]))
        assert low <= min(0, *values) and high >= max(0, *values)
        ratio = 1 if narrow else (2**bits - 2) / 2**bits
        assert float(high) == pytest.approx(-ratio * float(low))

    def test_schedule_counts_from_one(self) -> None:
        schedule = Schedule(2, 3)
        assert [schedule.quantizes(s) for s in (1, 2, 3)] == [False, True, True]
        assert [schedule.freezes(s) for s in (1, 2, 3)] == [False, False, True]
        assert not Schedule().freezes(10**9)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: FakeQuant(1), "1 bits; expected an integer from 2 to 16"),
        (lambda: FakeQuant(kernel="2.16"), "expected one of 2.15, 1.15"),  # type: ignore[arg-type]
        (lambda: FakeQuant().args(torch.ones(1), 1.0, 1.0), "expected low below high"),
        (lambda: FakeQuant().vars(torch.ones(2), torch.ones(2), torch.ones(2)), "expected one each"),
        (lambda: FakeQuant().vars_per_channel(torch.ones(2, 3), torch.ones(2), torch.ones(2)), "2 entries"),
        (lambda: FakeQuant().vars_per_channel(torch.ones(2), torch.tensor(1.0), torch.ones(2)), "expected vectors"),
        (lambda: FakeQuant().args(torch.ones(1, dtype=torch.int32)), "floating-point"),
        (lambda: MovingAvgQuantize(ema_decay=1.0), "expected 0 to below 1"),
        (lambda: LastValueQuantize()(torch.zeros(0)), "empty tensor"),
        (lambda: MovingAvgQuantize()(torch.tensor([1.0, torch.nan])), "expected finite numbers"),
        (lambda: LastValueQuantize(channels=2)(torch.tensor([[1.0, torch.inf]])), "expected finite numbers"),
        (lambda: LastValueQuantize(channels=2)(torch.zeros(3, 3)), "2 entries per channel"),
    ],
)
def test_bad_input_is_refused(wrong, message: str) -> None:
    with pytest.raises(HagoError, match=message):
        wrong()
