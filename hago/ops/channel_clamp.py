"""channel_clamp: values cut off at 0 and at an upper limit for each channel.

Internal: no torch call means it. Equalization makes it of a clamp from 0, such as relu6, on chips that list it: a
channel that is divided by a factor has its limit divided, too. The attributes: `limits`, one for each entry of `axis`,
and `rank`, that of the operand.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hago.ops._rule import Attrs, IntegerForm, OpRule, Refusal
from hago.ops._shared import unread
from hago.ops.clamp import quanta


def _along_axis(attrs: Attrs, limits: Tensor) -> Tensor:
    """The limits in a shape that broadcasts against the operand."""
    shape = [1] * attrs["rank"]
    shape[attrs["axis"]] = -1
    return limits.reshape(shape)


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    limits = _along_axis(attrs, torch.tensor(attrs["limits"], dtype=torch.float64))
    return torch.minimum(torch.clamp_min(x, 0.0), limits.to(x))


def _integer_attrs(attrs: Attrs, scales: Sequence[Tensor]) -> Attrs:
    return {"limits": quanta(_along_axis(attrs, torch.tensor(attrs["limits"], dtype=torch.float64)), scales[0])}


def _compute_int(attrs: Attrs, c: Tensor) -> Tensor:
    return torch.minimum(torch.clamp_min(c, 0), torch.as_tensor(attrs["limits"]).to(c))


RULE = OpRule(
    name="channel_clamp",
    aten=(),
    parse=unread,
    compute=_compute,
    integer=IntegerForm(slots=("follow",), compute=_compute_int, attrs=_integer_attrs, accepts_per_channel="all"),
    any_layout=True,
    clips_or_averages=True,
    refuses=(Refusal({"axis": 1, "rank": 4, "limits": [1.0, 2.0]}, ((1, 3, 4, 4),), "shape"),),
)
