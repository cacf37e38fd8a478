"""What an operator is: one frozen OpRule, constructed once in the file that bears the op's name.

A rule is plain functions in a record. A misspelt field fails at import; nothing registers itself;
`hago.ops.OPS` is built by reading the folder. `IntegerForm` (`_integer`) holds all that the integer world
needs; an op without one (layer_norm) is float everywhere.

Reading order for a new op: `parse` (how torch spells it), `compute` (what it does to real values),
`integer` (how scales travel, what it does to centered integers, how large they can get), `forms` (the
same where chips differ; a hardware file names the one that its chip computes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hago.ops._integer import Attrs, IntegerForm


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor argument of a torch call: the graph node that makes it."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen call as the frontend hands it to a rule's `parse`.

    Args:
        target: e.g. "aten.conv2d.default".
        arguments: by schema name, defaults filled in; tensors are `Ref`s.
        shapes: of each tensor argument's node at batch 1, by node name.
        shape: of the result at batch 1; None where it is not one tensor.
        item: of a call that gives several tensors (split, batch norm), the one that is asked for.
        open_axes: by node name, the axes whose size depends on the batch; others have their true size
            in `shapes`.
    """

    target: str
    arguments: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...] | None]
    shape: tuple[int, ...] | None
    item: int = 0
    open_axes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def is_open(self, name: str, axis: int) -> bool:
        """Whether the size of that axis of the tensor argument `name` depends on the batch."""
        return axis in self.open_axes.get(self.arguments[name].name, (0,))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor argument `name`."""
        shape = self.shapes[self.arguments[name].name]
        assert shape is not None
        return shape


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a call means: inputs (a node, or a constant to be made one) and attributes."""

    inputs: tuple[Ref | Tensor, ...]
    attrs: Attrs = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """A call of torch that must import as exactly one node of this op.

    Args:
        fn: takes the tensors in order.
        shapes: of the tensors, at batch 2 for those that are inputs.
        consts: positions that are parameters of the model and not inputs.
        low, high: the range that random values are drawn from.
        indices: positions that hold int64 indices, drawn from [0, high).
    """

    fn: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    consts: tuple[int, ...] = ()
    low: float = -2.0
    high: float = 2.0
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Attributes and input shapes that the op must refuse, naming the attribute."""

    attrs: Attrs
    shapes: tuple[tuple[int, ...], ...]
    names: str


def _no_macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """An operator.

    Args:
        name: as hardware files and node listings spell it; the file's name.
        aten: the torch calls that `parse` reads, e.g. "aten.conv2d.default".
        parse: what a call means, or None where this rule cannot say it (it stays opaque then).
        compute: `(attrs, *tensors) -> tensor` on real values; also runs on meta tensors, which is
            how shapes are inferred.
        integer: the integer side, or None for an op that is float everywhere.
        forms: integer sides by name, which hardware files may ask for; an op with these alone is else float.
        macs: multiply-accumulates at batch 1.
        samples: calls that the law suite tests this file with.
        refuses: attributes that must raise, naming the attribute.
        aliases: other names (the RFC's, say) that hardware files may use.
        any_layout: whether `compute` gives the same bits however its values lie in memory, as exactly rounded
            arithmetic entry by entry does; others are given contiguous values, so that every engine has one result.
    """

    name: str
    aten: tuple[str, ...]
    parse: Callable[[Call], Parsed | None]
    compute: Callable[..., Any]
    integer: IntegerForm | None = None
    forms: Mapping[str, IntegerForm] = field(default_factory=dict)
    macs: Callable[[Attrs, Sequence[tuple[int, ...]], tuple[int, ...]], int] = _no_macs
    samples: tuple[Sample, ...] = ()
    refuses: tuple[Refusal, ...] = ()
    aliases: tuple[str, ...] = ()
    any_layout: bool = False

    def computed_as(self, form: str | None) -> OpRule:
        """The rule with one of its forms as its integer side; None leaves it as it is."""
        return self if form is None else replace(self, integer=self.forms[form])

    def compute_int(self, attrs: Attrs, *values: Tensor) -> Tensor:
        """The op on centered integers in any carrier."""
        assert self.integer is not None
        return (self.integer.compute or self.compute)(attrs, *values)
