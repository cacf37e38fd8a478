"""slice: part of an axis, from `start` to `stop` (None: the end) by `step`; also one part of a split."""

import sys
from typing import Any

from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Refusal, Sample
from hago.ops._shared import axis_of, has_ref, plain


def _part(call: Call, size: int) -> tuple[int, int]:
    """Where the asked-for part of a split starts and stops."""
    if call.target != "aten.split_with_sizes.default":
        each = call["split_size"] if call.target == "aten.split.Tensor" else -(-size // call["chunks"])
        return call.item * each, min((call.item + 1) * each, size)
    sizes = plain(call["split_sizes"])
    return sum(sizes[: call.item]), sum(sizes[: call.item + 1])


def _parse(call: Call) -> Parsed | None:
    if has_ref([v for k, v in call.arguments.items() if k != "self"]):
        return None
    axis = axis_of(call)
    size = call.shape_of("self")[axis]
    whole: Any = sys.maxsize if call.is_open("self", axis) else size
    if call.target == "aten.slice.Tensor":
        start, stop, step = call["start"] or 0, call["end"], call["step"]
    elif call.is_open("self", axis):
        return None
    else:
        (start, stop), step = _part(call, size), 1
    stop = None if stop is None or stop >= whole else stop
    return Parsed((call["self"],), {"axis": axis, "start": start, "stop": stop, "step": step})


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    part = slice(attrs["start"], attrs["stop"], attrs["step"])
    return x[(slice(None),) * attrs["axis"] + (part,)]


RULE = OpRule(
    name="slice",
    aten=("aten.slice.Tensor", "aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default"),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(slots=("follow",)),
    moves_values=True,
    samples=(
        Sample(lambda x: x.narrow(1, 1, 2), ((2, 5, 3),)),
        Sample(lambda x: x.tensor_split(2, 2)[0], ((2, 3, 7),)),
        Sample(lambda x: x.split(2, 1)[0], ((2, 5, 3),)),
        Sample(lambda x: x.split([3, 2], -1)[0], ((2, 3, 5),)),
        Sample(lambda x: x.chunk(3, 1)[0], ((2, 5),)),
    ),
    refuses=(
        Refusal({"axis": 3, "start": 0, "stop": 1, "step": 1}, ((1, 3, 4),), "axis"),
        Refusal({"axis": 1, "start": 0, "stop": 1, "step": 0}, ((1, 3, 4),), "step"),
    ),
    aliases=("strided_slice",),
)
