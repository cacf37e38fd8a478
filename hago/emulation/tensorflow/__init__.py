"""TensorFlow's fake quantization, its training layers, and the graph rewrite of contrib.quantize."""

from hago.emulation._layers import BatchNorm
from hago.emulation.tensorflow.fake_quantize import (
    BatchRange,
    FakeQuant,
    LastValueQuantize,
    MovingAvgQuantize,
    RangeObserver,
    Schedule,
)
from hago.emulation.tensorflow.layers import FoldedLayer, FoldedPass
from hago.emulation.tensorflow.rewrite import FakeQuantOp, Op, OpGraph, Rewritten, quantize_ops

__all__ = [
    "BatchNorm",
    "BatchRange",
    "FakeQuant",
    "FakeQuantOp",
    "FoldedLayer",
    "FoldedPass",
    "LastValueQuantize",
    "MovingAvgQuantize",
    "Op",
    "OpGraph",
    "RangeObserver",
    "Rewritten",
    "Schedule",
    "quantize_ops",
]
