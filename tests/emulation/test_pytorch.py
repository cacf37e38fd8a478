"""PyTorch's quantizers and observers against torch itself."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hago.emulation.pytorch import (
    FakeQuantize,
    MinMaxObserver,
    QRange,
    fake_quantize,
    fake_quantize_learnable,
    quantize,
)
from hago.errors import HagoError

#: Half integers times a scale: every other value is a tie.
HALVES = st.lists(st.integers(-600, 600), min_size=1, max_size=24)
SCALES = st.sampled_from([0.5, 0.1, 0.3, 0.0117647, 7.0])
#: Powers of two, with which a fused multiply-add on some machines changes nothing.
DYADIC = st.sampled_from([0.5, 0.125, 4.0])
ENDS = st.sampled_from([(-128, 127), (0, 255), (-8, 7), (0, 15)])

PLAIN = list(itertools.product(["qint8", "quint8", "qint32"], ["affine", "symmetric"], [False, True]))


def grads(call, *leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
    fresh = [t.detach().clone().requires_grad_() for t in leaves]
    y = call(*fresh)
    y.backward(torch.arange(1.0, y.numel() + 1).reshape(y.shape))
    return y.detach(), [t.grad for t in fresh if t.grad is not None]


@given(HALVES, SCALES, ENDS, st.integers(0, 15))
def test_fake_quantize_is_torchs(halves: list[int], scale: float, ends: tuple[int, int], zero: int) -> None:
    zero = min(zero, ends[1])
    x = torch.tensor(halves) * 0.5 * scale
    ours = grads(lambda v: fake_quantize(v, scale, zero, *ends), x)
    theirs = grads(lambda v: torch.fake_quantize_per_tensor_affine(v, scale, zero, *ends), x)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1][0], theirs[1][0])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_fake_quantize_per_channel_is_torchs(axis: int) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 5, generator=g) * 4
    scale = torch.rand(x.shape[axis], generator=g) * 0.1 + 0.01
    zero = torch.randint(-8, 8, (x.shape[axis],), generator=g, dtype=torch.int32)
    ours = grads(lambda v: fake_quantize(v, scale, zero, -32, 31, axis), x)
    theirs = grads(lambda v: torch.fake_quantize_per_channel_affine(v, scale, zero, axis, -32, 31), x)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1][0], theirs[1][0])


FLOATS = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
#: Any scale, and places of values, many of which are next to ties.
ANY_SCALE = st.floats(2**-10, 8.0, width=32)
NEAR_TIES = st.lists(st.tuples(st.integers(-300, 300), st.integers(-3, 3)), min_size=1, max_size=24)


def near_ties(places: list[tuple[int, int]], scale: float, dtype: torch.dtype) -> Tensor:
    """Half integers times a scale, moved by a few representable values of the dtype."""
    values = (torch.tensor([half for half, _ in places], dtype=torch.float64) * 0.5 * scale).to(dtype)
    for step in range(3):
        direction = torch.tensor([(off > step) - (off < -step) for _, off in places], dtype=torch.float64)
        values = torch.where(direction == 0, values, torch.nextafter(values, (direction * torch.inf).to(dtype)))
    return values


@given(NEAR_TIES, ANY_SCALE, FLOATS, ENDS, st.integers(0, 15))
def test_fake_quantize_of_any_dtype_is_torchs(places, scale, dtype, ends, zero) -> None:
    zero, x = min(zero, ends[1]), near_ties(places, scale, dtype)
    ours = grads(lambda v: fake_quantize(v, scale, zero, *ends), x)
    theirs = grads(lambda v: torch.fake_quantize_per_tensor_affine(v, scale, zero, *ends), x)
    assert ours[0].dtype == dtype and torch.equal(ours[0], theirs[0]) and torch.equal(ours[1][0], theirs[1][0])


@given(NEAR_TIES, ANY_SCALE, FLOATS, ENDS, st.integers(0, 15))
def test_fake_quantize_of_channels_of_any_dtype_is_torchs(places, scale, dtype, ends, zero) -> None:
    x = torch.stack([near_ties(places, s, dtype) for s in (scale, scale / 3)])
    s, z = torch.tensor([scale, scale / 3]), torch.tensor([min(zero, ends[1]), 0], dtype=torch.int32)
    ours = grads(lambda v: fake_quantize(v, s, z, *ends, 0), x)
    theirs = grads(lambda v: torch.fake_quantize_per_channel_affine(v, s, z, 0, *ends), x)
    assert ours[0].dtype == dtype and torch.equal(ours[0], theirs[0]) and torch.equal(ours[1][0], theirs[1][0])


@given(NEAR_TIES, ANY_SCALE, FLOATS, ENDS, st.floats(-6, 12, width=16), st.booleans())
def test_learnable_of_any_dtype_is_torchs(places, scale, dtype, ends, zero, channels) -> None:
    x, s, z = near_ties(places, scale, dtype)[None], torch.tensor([scale]), torch.tensor([zero])
    ours = fake_quantize_learnable(x, s, z, *ends, 1.0, 0 if channels else None)
    if channels:
        theirs = torch._fake_quantize_learnable_per_channel_affine(x, s, z, 0, *ends, 1.0)
    else:
        theirs = torch._fake_quantize_learnable_per_tensor_affine(x, s, z, *ends, 1.0)
    assert ours.dtype == dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("axis", [None, 0])
def test_learnable_of_any_dtype_has_the_gradients_of_float32(dtype: torch.dtype, axis: int | None) -> None:
    """torch has no such gradients for float16 and float64; on values that all dtypes represent, they must be equal."""
    x = torch.arange(-48, 48).reshape(2, -1) * 0.125
    s, z = torch.full((1 if axis is None else 2,), 0.5), torch.zeros(1 if axis is None else 2)
    ours = grads(lambda *t: fake_quantize_learnable(*t, -8, 7, 1.0, axis), x.to(dtype), s, z)
    plain = grads(lambda *t: fake_quantize_learnable(*t, -8, 7, 1.0, axis), x, s, z)
    assert ours[1][0].dtype == dtype
    assert all(torch.equal(a.float(), b) for a, b in zip(ours[1], plain[1], strict=True))


@pytest.mark.parametrize(("dtype", "kind", "reduce"), PLAIN)
@pytest.mark.parametrize("whole", ["per_tensor", "per_channel"])
def test_observers_refuse_what_torchs_refuse(dtype: str, kind: str, reduce: bool, whole: str) -> None:
    scheme, name = f"{whole}_{kind}", {"per_tensor": "MinMaxObserver", "per_channel": "PerChannelMinMaxObserver"}[whole]
    refused = []
    for make in (
        lambda: MinMaxObserver(QRange(dtype, scheme, reduce)),
        lambda: torch_observer(name, **upstream_options(dtype, scheme, reduce, None)),
    ):
        try:
            make()
            refused.append(False)
        except (HagoError, NotImplementedError):
            refused.append(True)
    assert refused[0] == refused[1]


def test_values_that_are_not_finite() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30], requires_grad=True)
    y = fake_quantize(x, 0.5, 1, -8, 7)
    y.sum().backward()
    assert y.tolist() == [-4.5, 3.0, -4.5, 3.0]
    assert x.grad is not None and x.grad.tolist() == [0, 0, 0, 0]


@given(HALVES, DYADIC, ENDS, st.floats(-6, 12, width=16))
def test_learnable_is_torchs(halves: list[int], scale: float, ends: tuple[int, int], zero: float) -> None:
    x = torch.tensor(halves) * 0.5 * scale
    s, z = torch.tensor([scale]), torch.tensor([zero])
    ours = grads(lambda *t: fake_quantize_learnable(*t, *ends, 0.25), x, s, z)
    theirs = grads(lambda *t: torch._fake_quantize_learnable_per_tensor_affine(*t, *ends, 0.25), x, s, z)
    assert torch.equal(ours[0], theirs[0])
    for mine, upstream in zip(ours[1], theirs[1], strict=True):
        assert torch.allclose(mine, upstream, rtol=1e-4, atol=1e-2 * scale)


@pytest.mark.parametrize("axis", [0, 1])
def test_learnable_per_channel_is_torchs(axis: int) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-40, 40, (12, 12), generator=g) * 0.125
    s = torch.tensor([0.25, 0.5, 1.0, 2.0]).repeat(3)
    z = torch.randint(-20, 20, (12,), generator=g) * 0.5
    ours = grads(lambda *t: fake_quantize_learnable(*t, -8, 7, 1.0, axis), x, s, z)
    theirs = grads(lambda *t: torch._fake_quantize_learnable_per_channel_affine(*t, axis, -8, 7, 1.0), x, s, z)
    assert torch.equal(ours[0], theirs[0])
    for mine, upstream in zip(ours[1], theirs[1], strict=True):
        assert torch.allclose(mine, upstream, rtol=1e-5, atol=1e-5)


@given(HALVES, DYADIC, st.sampled_from(["qint8", "quint8", "qint32"]), st.integers(0, 100))
def test_quantize_is_torchs(halves: list[int], scale: float, dtype: str, zero: int) -> None:
    x = torch.tensor(halves) * 0.5 * scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated
        theirs = torch.quantize_per_tensor(x, scale, zero, getattr(torch, dtype)).int_repr()
    ours = quantize(x, scale, zero, dtype)
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["qint8", "quint8", "qint32"])
def test_quantize_per_channel_rounds_twice_as_torch_does(dtype: str) -> None:
    """Next to ties, where one rounding of product and sum gives other integers."""
    g = torch.Generator().manual_seed(0)
    scale = torch.rand(64, generator=g) * 0.4 + 0.01
    zero = torch.randint(0 if dtype == "quint8" else -60, 60, (64,), generator=g)
    ties = (torch.randint(-60, 60, (2000, 64), generator=g) + 0.5) * scale
    x = torch.nextafter(ties, ties + torch.randint(-1, 2, ties.shape, generator=g))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated
        theirs = torch.quantize_per_channel(x, scale.double(), zero, 1, getattr(torch, dtype)).int_repr()
    assert torch.equal(quantize(x, scale, zero, dtype, 1), theirs)


def test_gradients_of_small_scales_are_torchs() -> None:
    g = torch.Generator().manual_seed(0)
    for scale in (torch.rand(8, generator=g) * 0.3 + 0.01 for _ in range(100)):
        x, z = 3 * torch.randn(7, 8, generator=g), torch.randint(-5, 5, (8,), generator=g).float()
        ours = grads(lambda *t: fake_quantize_learnable(*t, -128, 127, 1.0, 1), x, scale, z)
        theirs = grads(lambda *t: torch._fake_quantize_learnable_per_channel_affine(*t, 1, -128, 127, 1.0), x, scale, z)
        torch.testing.assert_close(ours[1][1], theirs[1][1], rtol=2e-6, atol=2e-6)


def test_quantize_per_channel_and_the_tie_that_differs() -> None:
    x = torch.tensor([[-0.75, 0.25], [0.75, 1.25]])
    assert quantize(x, torch.tensor([0.5, 0.25]), torch.tensor([1, 0]), "qint8", 0).tolist() == [[0, 2], [3, 5]]
    whole = fake_quantize(x[:1], 0.5, 1, -128, 127) / 0.5 + 1
    assert whole.tolist() == [[-1, 1]]


# ---------------------------------------------------------------- observers
BATCHES = [torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -0.125]]), torch.tensor([[0.1, 4.0, -0.5], [1.5, 0.0, 2.0]])]


def torch_observer(kind: str, **options):
    observer = pytest.importorskip("torch.ao.quantization.observer")
    return getattr(observer, kind)(**options)


def upstream_options(dtype: str, scheme: str, reduce: bool, ends: tuple[int, int] | None) -> dict:
    options = {"dtype": getattr(torch, dtype), "qscheme": getattr(torch, scheme), "reduce_range": reduce}
    return options | ({} if ends is None else {"quant_min": ends[0], "quant_max": ends[1]})


@pytest.mark.parametrize("averaging", [None, 0.3])
@pytest.mark.parametrize("ends", [None, (-4, 9), (0, 15)])
@pytest.mark.parametrize(("dtype", "scheme", "reduce"), PLAIN)
def test_per_tensor_observers_are_torchs(dtype, scheme, reduce, ends, averaging) -> None:
    if (dtype, scheme, reduce) == ("quint8", "symmetric", True):
        with pytest.raises(HagoError, match="as torch's observers of extremes do"):
            MinMaxObserver(QRange(dtype, "per_tensor_symmetric", True))
        return
    scheme = f"per_tensor_{scheme}"
    lows = {} if ends is None else {"quant_min": ends[0], "quant_max": ends[1]}
    ours = MinMaxObserver(QRange(dtype, scheme, reduce, **lows), averaging_constant=averaging)
    more = {} if averaging is None else {"averaging_constant": averaging}
    name = "MinMaxObserver" if averaging is None else "MovingAverageMinMaxObserver"
    theirs = torch_observer(name, **upstream_options(dtype, scheme, reduce, ends), **more)
    for batch in BATCHES:
        ours(batch), theirs(batch)
    assert ours.qrange.ends == (theirs.quant_min, theirs.quant_max)
    for mine, upstream in zip(ours.qparams(), theirs.calculate_qparams(), strict=True):
        assert torch.equal(mine, upstream.to(mine.dtype))


@pytest.mark.parametrize("averaging", [None, 0.3])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("scheme", ["affine", "symmetric", "affine_float_qparams"])
@pytest.mark.parametrize("dtype", ["qint8", "quint8"])
def test_per_channel_observers_are_torchs(dtype, scheme, axis, averaging) -> None:
    scheme = f"per_channel_{scheme}"
    ours = MinMaxObserver(QRange(dtype, scheme), ch_axis=axis, averaging_constant=averaging)
    more = {} if averaging is None else {"averaging_constant": averaging}
    name = "PerChannelMinMaxObserver" if averaging is None else "MovingAveragePerChannelMinMaxObserver"
    theirs = torch_observer(name, ch_axis=axis, **upstream_options(dtype, scheme, False, None), **more)
    for batch in BATCHES:
        ours(batch), theirs(batch)
    for mine, upstream in zip(ours.qparams(), theirs.calculate_qparams(), strict=True):
        assert torch.equal(mine, upstream)


def test_before_any_data() -> None:
    for scheme in ("per_tensor_affine", "per_channel_affine"):
        observer = MinMaxObserver(QRange(qscheme=scheme))
        assert torch.equal(observer(torch.zeros(0)), torch.zeros(0)) and not observer.has_range
        assert [t.tolist() for t in observer.qparams()] == [[1.0], [0]]


@pytest.mark.parametrize("scheme", ["per_tensor_affine", "per_channel_affine"])
def test_state_round_trips(scheme: str) -> None:
    trained, fresh = (FakeQuantize(MinMaxObserver(QRange("qint8", scheme), ch_axis=1)) for _ in range(2))
    trained(BATCHES[0])
    trained.observer_enabled.fill_(0)
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh(BATCHES[1]), trained(BATCHES[1]))
    assert all(torch.equal(v, fresh.state_dict()[k]) for k, v in trained.state_dict().items())
    assert fresh.scale.shape == ((3,) if "channel" in scheme else (1,))


def test_switches_of_the_fake_quantization() -> None:
    module = FakeQuantize()
    module.fake_quant_enabled.fill_(0)
    assert torch.equal(module(BATCHES[0]), BATCHES[0]) and module.scale.item() != 1.0
    scale = module.scale.clone()
    module.fake_quant_enabled.fill_(1)
    module.observer_enabled.fill_(0)
    assert not torch.equal(module(BATCHES[0] * 3), BATCHES[0] * 3)
    assert torch.equal(module.scale, scale)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: QRange("qint9"), "Did you mean"),
        (lambda: QRange(qscheme="per_tensor"), "expected one of per_tensor_affine"),
        (lambda: QRange(quant_min=0), "give both or none"),
        (lambda: QRange(quant_min=1, quant_max=5), "0 among them"),
        (lambda: QRange("qint8", quant_min=-200, quant_max=200), "at most 256"),
        (lambda: MinMaxObserver(QRange("quint8", "per_tensor_symmetric", True)), "reduce_range with per_tensor_sym"),
        (lambda: MinMaxObserver()(torch.ones(1, dtype=torch.int64)), "floating-point"),
        (lambda: MinMaxObserver(QRange(qscheme="per_channel_affine"), ch_axis=3)(torch.ones(2)), "no axis 3"),
        (lambda: fake_quantize(torch.ones(2), torch.ones(2), 0, 0, 15), "expected one, or an axis"),
        (lambda: fake_quantize(torch.ones(2), 1.0, 0, 15, 15), "expected qmin below qmax"),
        (lambda: quantize(torch.ones(2), 1.0, 0, "qint7"), "dtype is 'qint7'"),
    ],
)
def test_bad_input_is_refused(wrong, message: str) -> None:
    with pytest.raises(HagoError, match=message):
        wrong()


def test_a_range_that_is_not_finite_is_refused() -> None:
    observer = MinMaxObserver()
    observer(torch.tensor([1.0, torch.nan]))
    with pytest.raises(HagoError, match="expected finite values"):
        observer.qparams()
    per_channel = MinMaxObserver(QRange(qscheme="per_channel_affine"))
    per_channel(torch.ones(3, 2))
    with pytest.raises(HagoError, match="3 entries per channel"):
        per_channel(torch.ones(2, 2))


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="needs torch's x86 kernels")
def test_calibrated_and_converted_it_is_torchs_quantized_network() -> None:
    """prepare_fx, one batch, convert_fx: the same scales, zero points and weights; outputs to one quantum."""
    from torch.ao.quantization import default_qconfig
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 4, 3)
    x = torch.randn(8, 3, 6, 6)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(torch.nn.Sequential(conv, torch.nn.ReLU()).eval(), {"": default_qconfig}, (x,))
        prepared(x)
        theirs = convert_fx(prepared)
        y = theirs(x)
    layer = theirs[0] if hasattr(theirs, "__getitem__") else theirs.get_submodule("0")
    qparams = []
    for value in (x, torch.relu(conv(x)).detach()):
        observer = MinMaxObserver(QRange("quint8", quant_min=0, quant_max=127))
        observer(value)
        qparams.append([t.reshape(()) for t in observer.qparams()])
    (x_scale, x_zero), (y_scale, y_zero) = qparams
    weights = MinMaxObserver(QRange("qint8", "per_tensor_symmetric"))
    weights(conv.weight.detach())
    w_scale, w_zero = weights.qparams()
    w = quantize(conv.weight.detach(), w_scale, w_zero, "qint8")
    assert (float(y_scale), int(y_zero)) == (pytest.approx(layer.scale, rel=1e-6), layer.zero_point)
    assert torch.equal(w, layer.weight().int_repr())
    q = quantize(x, x_scale, x_zero, "quint8")
    c = torch.nn.functional.conv2d((q.double() - x_zero), w.double()) * (x_scale * w_scale).double()
    real = torch.relu(c + conv.bias.detach().double().reshape(-1, 1, 1))
    ours = (torch.round(real / y_scale).add(y_zero).clamp(0, 255) - y_zero) * y_scale
    assert float((ours - y).abs().max()) <= 1.01 * float(y_scale)
    assert float((ours.float() == y).float().mean()) > 0.99
