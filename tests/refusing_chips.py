"""Chips on which not all bits go together, and networks for them."""

from __future__ import annotations

from typing import Final

from building import Builder, seeded

from hago.arithmetic.types import INT32
from hago.graph.graph import Graph
from hago.hardware.hardware import Accumulator, Hardware, OpDesc, TensorScheme

DATA: Final = [(seeded(4, 3, 6, 6) * 3,), (seeded(4, 3, 6, 6),)]


def layer(operand: str, out: str, weight: str = "int8") -> OpDesc:
    """A signature of convolutions."""
    return OpDesc([operand, weight], out, Accumulator(INT32), "output", min_bits=3)


def signs(floats: bool = False) -> Hardware:
    """Four bits have a sign, and eight have none: what reads four bits gives four."""
    layers, between = [layer("uint8", "int4"), layer("uint8", "uint8"), layer("int4", "int4")], ["int4", "uint8"]
    real = [OpDesc("float32", "float32", cost={"macs_per_cycle": 1, "elements_per_cycle": 1})] * floats
    ops = {"conv2d": [*layers, *real], "relu": [*(OpDesc(d, d) for d in between), *real]}
    return Hardware(ops, name="signs", activation=TensorScheme("affine"))


def behind() -> Hardware:
    """Four bits have a sign behind eight, and none behind four that have none, which the wide signature reads."""
    pairs = [("int8", "uint4"), ("uint8", "int4"), ("int4", "int4"), ("uint8", "uint8"), ("uint4", "uint4")]
    between = [OpDesc(d, d) for d in ("int4", "uint8", "int8", "uint4")]
    ops = {"conv2d": [layer(*p) for p in pairs], "relu": between}
    return Hardware(ops, name="behind", activation=TensorScheme("affine"))


def either() -> Hardware:
    """16 bits by 4, or 8 by 8: the most bits of both do not go together."""
    layers = [layer("int16", "int16", "int4"), layer("int8", "int8")]
    ops = {"conv2d": layers, "relu": [OpDesc(d, d) for d in ("int16", "int8")]}
    return Hardware(ops, name="either", activation=TensorScheme("symmetric"))


def gathering() -> Hardware:
    """Layers give eight bits or four, and what gathers their values reads four of all of them or eight."""
    ops = {"conv2d": [layer("int8", "int8"), layer("int8", "int4")], "concat": [OpDesc(d, d) for d in ("int4", "int8")]}
    return Hardware(ops, name="gathering", activation=TensorScheme("symmetric"))


def side_by_side(count: int) -> Graph:
    """Convolutions of one value, gathered."""
    b = Builder()
    x = b.input(3, 6, 6, name="x")
    made = [b.conv2d(x, seeded(2, 3, 1, 1, seed=i), name=f"conv{i}") for i in range(count)]
    b.call("concat", *made, name="all", axis=1)
    return b.graph()


def layers(count: int) -> Graph:
    """Convolutions with relus between them."""
    b = Builder()
    x = b.input(3, 6, 6, name="x")
    for i in range(count):
        x = x if i == 0 else b.call("relu", x, name=f"relu{i}")
        x = b.conv2d(x, seeded(4, 4 if i else 3, 3, 3, seed=i), name=f"conv{i}", padding=(1, 1))
    return b.graph(x)
