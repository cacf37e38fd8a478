"""What rules read out of ATen calls, and what they leave to the opaque op."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hago.errors import HagoError
from hago.ops import OPS, IntegerForm, aliases, parsers
from hago.ops._rule import Call, Parsed, Ref

RULES = parsers()
X, Y, SIZE = Ref("x"), Ref("y"), Ref("size")


def call(target: str, shape: tuple[int, ...], item: int = 0, y: tuple[int, ...] = (3,), **arguments: Any) -> Call:
    given = {"self": X, **arguments}
    return Call(f"aten.{target}", given, {"x": shape, "y": y, "size": None}, None, item)


def read(target: str, shape: tuple[int, ...], item: int = 0, y: tuple[int, ...] = (3,), **arguments: Any) -> Parsed:
    made = call(target, shape, item, y, **arguments)
    parsed = RULES[made.target].parse(made)
    assert parsed is not None
    return parsed


# ---------------------------------------------------------------- the table of rules
def test_every_name_means_one_op() -> None:
    assert all(RULES[t].name == r.name for r in OPS.values() for t in r.aten)
    assert all(aliases()[a] == r.name for r in OPS.values() for a in r.aliases)
    assert not set(aliases()) & set(OPS)


def test_every_target_is_an_operator_of_torch() -> None:
    for target in RULES:
        _, name, overload = target.split(".")
        assert hasattr(getattr(torch.ops.aten, name), overload), target


# ---------------------------------------------------------------- calls that give several tensors
@pytest.mark.parametrize("item", range(3))
def test_a_part_of_a_split_is_a_slice(item: int) -> None:
    x = torch.arange(10.0).reshape(2, 5)
    calls = {"split.Tensor": {"split_size": 2}, "split_with_sizes.default": {"split_sizes": [2, 2, 1]}}
    for target, sizes in calls.items():
        parsed = read(target, (1, 5), item, dim=-1, **sizes)
        assert torch.equal(OPS["slice"].compute(parsed.attrs, x), x.split([2, 2, 1], 1)[item])


def test_a_part_of_an_unbind_is_a_select() -> None:
    assert read("unbind.int", (1, 3, 4), 2, dim=-2).attrs == {"axis": 1, "index": 2}


def test_only_the_first_of_several_results_is_read() -> None:
    norm = {"input": X, "weight": None, "bias": None, "running_mean": Y, "running_var": Y, "eps": 1e-5}
    parsed = read("_native_batch_norm_legit_no_training.default", (1, 3, 4), **norm)
    weight, bias = parsed.inputs[1:3]
    assert isinstance(weight, Tensor) and weight.tolist() == [1, 1, 1]
    assert isinstance(bias, Tensor) and bias.tolist() == [0, 0, 0]
    pool = {"kernel_size": [2, 2], "stride": [], "padding": [0, 0], "dilation": [1, 1], "ceil_mode": False}
    assert read("max_pool2d_with_indices.default", (1, 3, 4, 4), **pool).attrs["stride"] == [2, 2]
    for made in (
        call("_native_batch_norm_legit_no_training.default", (1, 3, 4), 1, **norm),
        call("max_pool2d_with_indices.default", (1, 3, 4, 4), 1, **pool),
        call("adaptive_max_pool2d.default", (1, 3, 4, 4), 1, output_size=[2, 2]),
    ):
        assert RULES[made.target].parse(made) is None


# ---------------------------------------------------------------- normal forms
def test_axes_count_from_the_front() -> None:
    assert read("transpose.int", (1, 2, 3, 4), dim0=-1, dim1=1).attrs == {"axes": [0, 3, 2, 1]}
    assert read("permute.default", (1, 2, 3), dims=[0, -1, 1]).attrs == {"axes": [0, 2, 1]}
    assert read("t.default", (1, 2)).attrs == {"axes": [1, 0]}
    assert read("unsqueeze.default", (1, 2), dim=-1).attrs == {"axis": 2}
    mean = read("mean.dim", (1, 2, 3, 4), dim=[-1, 1], keepdim=False, dtype=None)
    assert mean.attrs == {"axes": [1, 3], "keepdim": False, "count": 8}


def test_one_window_size_stands_for_every_axis() -> None:
    attrs = read("avg_pool2d.default", (1, 2, 8, 8), kernel_size=[3], stride=[], padding=0, ceil_mode=False).attrs
    assert (attrs["kernel_size"], attrs["stride"], attrs["padding"]) == ([3, 3], [3, 3], [0, 0])


def test_a_whole_slice_says_so() -> None:
    for end in (None, 5, 1 << 62):
        assert read("slice.Tensor", (1, 5), dim=1, start=None, end=end, step=1).attrs["stop"] is None
    assert read("slice.Tensor", (1, 5), dim=0, start=0, end=3, step=1).attrs["stop"] == 3


def test_clamp_in_all_spellings() -> None:
    assert read("relu6.default", (1, 3)).attrs == {"min": 0.0, "max": 6.0}
    assert read("hardtanh.default", (1, 3), min_val=-1, max_val=2).attrs == {"min": -1, "max": 2}
    assert read("clamp_min.default", (1, 3), min=0).attrs == {"min": 0, "max": None}
    assert read("clamp.default", (1, 3), min=0, max=math.inf).attrs == {"min": 0, "max": None}


def test_numbers_become_constants_on_their_side() -> None:
    first, second = read("rsub.Scalar", (1, 3), other=2, alpha=1).inputs
    assert isinstance(first, Tensor) and float(first) == 2.0 and second == X
    first, second = read("sub.Tensor", (1, 3), other=2, alpha=1).inputs
    assert first == X and isinstance(second, Tensor)


# ---------------------------------------------------------------- what stays opaque
@pytest.mark.parametrize(
    "made",
    [
        call("sub.Tensor", (1, 3), other=Y, alpha=2),
        call("mean.dim", (1, 3), dim=[0], keepdim=False, dtype=None),
        call("mean.dim", (1, 3), dim=None, keepdim=False, dtype=None),
        call("sum.dim_IntList", (1, 3), dim=[1], keepdim=False, dtype=torch.float64),
        call("expand.default", (1, 3), size=[SIZE, 3]),
        call("slice.Tensor", (1, 5), dim=1, start=0, end=SIZE, step=1),
        call("split.Tensor", (1, 5), dim=0, split_size=1),
        call("select.int", (1, 5), dim=1, index=SIZE),
        call("pad.default", (1, 5), pad=[0, 0, 1, 1], mode="constant", value=None),
        call("max_pool1d.default", (1, 8), kernel_size=[2], stride=[2], padding=[0], dilation=[1], ceil_mode=False),
        call("adaptive_avg_pool2d.default", (1, 8, 8), output_size=[1, 1]),
        call("matmul.default", (1, 3), other=Y),
        call("addmm.default", (3,), mat1=Y, mat2=Y, beta=1, alpha=2),
        call("index.Tensor", (1, 5, 5), indices=[None, Y, Y]),
        call("index_select.default", (1, 5), y=(), dim=1, index=Y),
        call("layer_norm.default", (1, 3), input=X, weight=None, bias=Y, normalized_shape=[3], eps=1e-5),
        call("elu.default", (1, 3), alpha=1.0, scale=1.05, input_scale=1),
        call("clamp.default", (1, 3), min=None, max=math.inf),
        call("softmax.int", (1, 3), dim=1, dtype=torch.float64),
        call("_to_copy.default", (1, 3), dtype=None, device=None),
        call("upsample_nearest2d.vec", (1, 3, 4, 4), input=X, output_size=[SIZE, 8], scale_factors=None),
        call("upsample_nearest2d.default", (1, 3, 4, 4), output_size=[8, 8], scales_h=2.0, scales_w=2.0),
    ],
    ids=lambda made: made.target,
)
def test_stays_opaque(made: Call) -> None:
    assert RULES[made.target].parse(made) is None


def test_the_batch_is_never_squeezed() -> None:
    parse = RULES["aten.squeeze.dim"].parse
    shapes = {"x": (1, 1, 5)}
    assert parse(Call("aten.squeeze.dim", {"self": X, "dim": 0}, shapes, (1, 5))) is None
    kept = parse(Call("aten.squeeze.dim", {"self": X, "dim": 1}, shapes, (1, 5)))
    assert kept is not None and kept.attrs == {"axes": [1]}


@pytest.mark.parametrize("slots", [("folow",), "follow", ("own", 1)])
def test_slots_of_an_unknown_kind_are_refused(slots: Any) -> None:
    with pytest.raises(HagoError, match=r"expected a tuple of own, common, follow, bias, plain"):
        IntegerForm(slots=slots)


@pytest.mark.parametrize("what", ["aten", "aliases"])
def test_a_text_in_place_of_several_is_refused(what: str) -> None:
    with pytest.raises(HagoError, match=f"{what} of the rule 'abs' is the text 'aten.abs.default'"):
        replace(OPS["relu"], name="abs", **{what: "aten.abs.default"})
