"""The insertion points of contrib.quantize: a graph for each of its patterns, and laws for all graphs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulation.insertion_graphs import Drawing, named
from hago.emulation.tensorflow.rewrite import FAKE_QUANT, Op, quantize_ops
from hago.errors import GraphError, HagoError


def points(ops: list[Op], **options: object) -> set[str]:
    """Fake quantizations as `name <- producer -> consumers`."""
    inserted = quantize_ops(ops, **options).fake_quants  # type: ignore[arg-type]
    assert len({q.name for q in inserted}) == len(inserted)
    return {f"{q.name} <- {q.producer} -> {','.join(q.consumers)}" for q in inserted}


WEIGHT = "a/weights_quant <- a/weights/read -> a/Conv2D"

CASES = {
    "conv_relu6": {WEIGHT, "a/act_quant <- a/Relu6 -> o"},
    "conv_identity": {WEIGHT, "a/act_quant <- a/id -> o"},
    "matmul_relu": {"a/weights_quant <- a/weights/read -> a/MatMul", "a/act_quant <- a/Relu -> o"},
    "matmul_biasadd_only": {"a/weights_quant <- a/weights/read -> a/MatMul", "a/act_quant <- a/BiasAdd -> "},
    "depthwise_relu": {"dw/weights_quant <- dw/depthwise_weights/read -> dw/depthwise", "dw/act_quant <- dw/Relu -> o"},
    "conv_relu_maxpool": {WEIGHT, "a/act_quant <- a/Relu -> MaxPool"},
    "conv_relu_reshape": {WEIGHT, "a/act_quant <- a/Relu -> Reshape"},
    "conv_maxpool_relu": {WEIGHT, "a/act_quant <- a/BiasAdd -> MaxPool"},
    "conv_bn_relu_fused": {"a/weights_quant <- a/mul_fold -> a/Conv2D_Fold", "a/act_quant <- a/Relu -> o"},
    "matmul_sigmoid": {"a/weights_quant <- a/weights/read -> a/MatMul", "a/act_quant <- a/BiasAdd -> Sigmoid"},
    "conv_bypass_relu": {
        "s/a/weights_quant <- s/a/weights/read -> s/a/Conv2D",
        "s/a/conv_quant <- s/a/BiasAdd -> s/add",
        "s/act_quant <- s/Relu -> o",
    },
    "conv_bn_bypass_relu6": {
        "s/a/weights_quant <- s/a/mul_fold -> s/a/Conv2D_Fold",
        "s/a/conv_quant <- s/a/add_fold -> s/add",
        "s/act_quant <- s/Relu6 -> o",
    },
    "conv_relu_postbypass": {
        "s/a/weights_quant <- s/a/weights/read -> s/a/Conv2D",
        "s/a/act_quant <- s/a/Relu -> s/add",
        "s/post_activation_bypass_quant <- s/add -> o",
    },
}


@pytest.mark.parametrize("pattern", CASES)
def test_patterns(pattern: str) -> None:
    assert points(named(pattern)) == CASES[pattern]


def test_a_bypass_that_nothing_follows_is_quantized_itself() -> None:
    """The bias of the layer is quantized as its end, and the add as a sum of quantized tensors."""
    drawing = Drawing()
    x = drawing.op("x", "Placeholder")
    y = drawing.layer("conv", "s/a", x)
    drawing.op("s/sigmoid", "Sigmoid", drawing.op("s/add", "AddV2", x, y))
    assert points(drawing.ops) == {
        "s/a/weights_quant <- s/a/weights/read -> s/a/Conv2D",
        "s/a/act_quant <- s/a/BiasAdd -> s/add",
        "s/add/activation_AddV2_quant <- s/add -> s/sigmoid",
    }


def test_a_separable_convolution_without_activation_between() -> None:
    drawing = Drawing()
    y = drawing.layer("depthwise", "a", drawing.op("x", "Placeholder"), bias=False)
    y = drawing.layer("conv", "b", y)
    drawing.op("o", "Identity", drawing.op("b/Relu", "Relu", y))
    assert points(drawing.ops) == {
        "a/weights_quant <- a/depthwise_weights/read -> a/depthwise",
        "a/act_quant <- a/depthwise -> b/Conv2D",
        "b/weights_quant <- b/weights/read -> b/Conv2D",
        "b/act_quant <- b/Relu -> o",
    }


def test_a_dilated_depthwise_convolution() -> None:
    drawing = Drawing()
    x = drawing.op("x", "Placeholder")
    block, crops = drawing.op("block", "Const"), drawing.op("crops", "Const")
    x = drawing.op("a/SpaceToBatchND", "SpaceToBatchND", x, block, crops)
    y = drawing.op("a/depthwise", "DepthwiseConv2dNative", x, drawing.weight("a/depthwise_weights"))
    y = drawing.op("a/BatchToSpaceND", "BatchToSpaceND", y, block, crops)
    drawing.op("o", "Identity", drawing.op("a/Relu6", "Relu6", drawing.fused_norm("a", y)))
    rewritten = quantize_ops(drawing.ops)
    by_name = {op.name: op for op in rewritten.ops}
    assert by_name["a/BatchToSpaceND_Fold"].inputs == ("a/depthwise_Fold", "block", "crops")
    assert points(drawing.ops) == {
        "a/weights_quant <- a/mul_fold -> a/depthwise_Fold",
        "a/act_quant <- a/Relu6 -> o",
    }


def test_shared_weights_are_quantized_once() -> None:
    drawing = Drawing()
    weight = drawing.weight("shared")
    x = drawing.op("x", "Placeholder")
    for scope in "ab":
        y = drawing.layer("conv", scope, x, weight=weight)
        x = drawing.op(f"{scope}/Relu", "Relu", y)
    drawing.op("o", "Identity", x)
    assert points(drawing.ops) == {
        "a/weights_quant <- shared/read -> a/Conv2D,b/Conv2D",
        "a/act_quant <- a/Relu -> b/Conv2D",
        "b/act_quant <- b/Relu -> o",
    }


def test_an_identity_before_a_norm_is_no_activation() -> None:
    """It stays with the statistics; the folded layer is what is quantized."""
    drawing = Drawing()
    y = drawing.layer("conv", "a", drawing.op("x", "Placeholder"), bias=False)
    y = drawing.fused_norm("a", drawing.op("a/Identity", "Identity", y))
    drawing.op("o", "Identity", drawing.op("a/Relu", "Relu", y))
    assert points(drawing.ops) == {"a/weights_quant <- a/mul_fold -> a/Conv2D_Fold", "a/act_quant <- a/Relu -> o"}


def test_a_norm_of_a_matmul_stands_between_reshapes() -> None:
    drawing = Drawing()
    size = drawing.op("size", "Const")
    y = drawing.layer("matmul", "a", drawing.op("x", "Placeholder"), bias=False)
    y = drawing.fused_norm("a", drawing.op("a/Reshape", "Reshape", y, size))
    y = drawing.op("a/Reshape_1", "Reshape", y, size)
    drawing.op("o", "Identity", drawing.op("a/Relu", "Relu", y))
    expected = {"a/weights_quant <- a/mul_fold -> a/MatMul_Fold", "a/act_quant <- a/Relu -> o"}
    assert points(drawing.ops) == expected == points(drawing.ops, training=False)


def test_products_of_quantized_tensors() -> None:
    """A product is quantized past poolings and reshapes of what is, unless a relu alone reads it."""
    drawing = Drawing()
    y = drawing.layer("conv", "a", drawing.op("x", "Placeholder"))
    y = drawing.op("a/Relu", "Relu", y)
    gate = drawing.op("gate", "Sigmoid", y)
    product = drawing.op("product", "Mul", drawing.op("pool", "MaxPool", y), gate)
    cut = drawing.op("cut", "Mul", drawing.op("product/same", "Identity", product), gate)
    drawing.op("end", "Relu", cut)
    drawing.op("else", "Mul", gate, gate)
    assert points(drawing.ops) == {
        WEIGHT,
        "a/act_quant <- a/Relu -> gate,pool",
        "product/activation_Mul_quant <- product -> product/same",
    }


def test_the_eval_graph_has_the_same_points() -> None:
    for pattern in ("conv_relu", "conv_bn_relu_fused", "conv_bn_relu_unfused", "conv_bn_bypass_relu"):
        assert points(named(pattern), training=False) == points(named(pattern), training=True)


def test_a_folded_norm_in_training_and_in_eval() -> None:
    ops = named("conv_bn_relu_fused")
    inner = {"correction_mult", "post_conv_mul", "correction_add"}
    for training, expected in ((True, inner), (False, set())):
        names = {op.name.removeprefix("a/") for op in quantize_ops(ops, training=training).ops}
        assert names & inner == expected and names >= {"mul_fold", "Conv2D_Fold", "add_fold"}
    by_name = {o.name: o for o in quantize_ops(ops).ops}
    assert by_name["a/correction_mult"].inputs[1] == "a/weights/read"
    assert by_name["a/Conv2D_Fold"].inputs == ("x", f"a/weights_quant/{FAKE_QUANT}")
    assert by_name["a/Relu"].inputs == ("a/add_fold",)
    assert by_name["a/Conv2D"].inputs == ("x", "a/weights/read")  # still there, for the statistics


def test_only_what_is_in_the_scope_is_quantized() -> None:
    drawing = Drawing()
    x = drawing.op("x", "Placeholder")
    for scope in ("one/a", "oneself/a"):
        x = drawing.op(f"{scope}/Relu", "Relu", drawing.layer("conv", scope, x))
    drawing.op("o", "Identity", x)
    for scope in ("one", "one/"):
        assert points(drawing.ops, scope=scope) == {
            "one/a/weights_quant <- one/a/weights/read -> one/a/Conv2D",
            "one/a/act_quant <- one/a/Relu -> oneself/a/Conv2D",
        }
    assert points(drawing.ops, scope="nowhere") == set()


@pytest.mark.parametrize("kind", ["ApplyGradientDescent", "ResourceApplyAdam", "SparseApplyFtrl"])
def test_training_ops_are_refused(kind: str) -> None:
    with pytest.raises(HagoError, match="training op"):
        quantize_ops([*named("conv_relu"), Op("train", kind)])


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(GraphError, match="unique"):
        quantize_ops([Op("x", "Placeholder"), Op("x", "Placeholder")])
    with pytest.raises(GraphError, match="not in the graph"):
        quantize_ops([Op("y", "Relu", ("x",))])


# ---------------------------------------------------------------- laws
@st.composite
def graphs(draw: st.DrawFn) -> list[Op]:
    """Layers, norms, activations, adds, products and poolings put together at random."""
    drawing = Drawing()
    values = [drawing.op("x", "Placeholder")]
    weights: list[str] = []
    for index in range(draw(st.integers(1, 8))):
        scope = f"s{draw(st.integers(0, 1))}/n{index}"
        first, second = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
        kind = draw(st.sampled_from(["conv", "matmul", "depthwise", "norm", "join", "Relu", "Identity", "MaxPool"]))
        if kind in ("conv", "matmul", "depthwise"):
            weight = draw(st.sampled_from([*weights, None]))
            inserted = drawing.layer(kind, scope, first, bias=draw(st.booleans()), weight=weight)
            weights += [op.inputs[1] for op in drawing.ops if op.name.startswith(f"{scope}/") and len(op.inputs) == 2][
                :1
            ]
        elif kind == "norm":
            y = drawing.layer("conv", scope, first, bias=False)
            inserted = (drawing.fused_norm if draw(st.booleans()) else drawing.unfused_norm)(scope, y)
        elif kind == "join":
            inserted = drawing.op(f"{scope}/join", draw(st.sampled_from(["Add", "AddV2", "Mul"])), first, second)
        else:
            inserted = drawing.op(f"{scope}/{kind}", kind, first)
        values.append(inserted)
    return drawing.ops


def swapped(op: Op) -> Op:
    return Op(op.name, op.type, op.inputs[::-1]) if op.type in ("Add", "AddV2") and len(op.inputs) == 2 else op


@given(graphs(), st.booleans())
def test_nothing_is_quantized_twice_and_a_second_rewrite_changes_nothing(ops: list[Op], training: bool) -> None:
    first = quantize_ops(ops, training=training)
    producers = [q.producer for q in first.fake_quants]
    assert len(set(producers)) == len(producers)
    second = quantize_ops(first.ops, training=training)
    assert second.fake_quants == () and second.ops == first.ops


@given(graphs())
def test_what_reads_a_quantized_tensor_reads_its_fake_quantization(ops: list[Op]) -> None:
    rewritten = quantize_ops(ops)
    by_name = {op.name: op for op in rewritten.ops}
    for inserted in rewritten.fake_quants:
        fake = f"{inserted.name}/{FAKE_QUANT}"
        readers = {op.name for op in rewritten.ops if inserted.producer in op.inputs}
        assert readers == {fake} and by_name[fake].inputs == (inserted.producer,)
        assert all(fake in by_name[name].inputs for name in inserted.consumers)
    bare = {op.name: op.type for op in rewritten.ops if op.type != FAKE_QUANT}
    assert all(bare[op.name] == op.type for op in ops)


@given(graphs())
def test_layers_with_a_weight_of_their_own_are_found_whatever_the_order_of_addends(ops: list[Op]) -> None:
    def weights(drawn: list[Op]) -> set[str]:
        return {q.producer for q in quantize_ops(drawn).fake_quants if q.role == "weight"}

    assert weights(ops) == weights([swapped(op) for op in ops])
