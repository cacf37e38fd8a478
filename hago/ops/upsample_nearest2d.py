"""upsample_nearest2d: every output pixel is the nearest input pixel above and to the left."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, IntegerForm, OpRule, Refusal, Sample
from hago.ops._upsample import interpolation, parse_upsample


def _nearest(attrs: Attrs, x: Tensor) -> Tensor:
    return F.interpolate(x, **interpolation(attrs), mode="nearest")


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    """Which pixel is nearest is always asked in float32: torch's float64 kernel rounds otherwise, and
    it has none for int64."""
    if x.dtype == torch.float32:
        return _nearest(attrs, x)
    height, width = x.shape[2:]
    rows = torch.arange(height, dtype=torch.float32, device=x.device).reshape(1, 1, -1, 1)
    columns = torch.arange(width, dtype=torch.float32, device=x.device).reshape(1, 1, 1, -1)
    row_of = _nearest(attrs, rows.expand(1, 1, height, width))[0, 0, :, 0]
    column_of = _nearest(attrs, columns.expand(1, 1, height, width))[0, 0, 0, :]
    return x.index_select(2, row_of.long()).index_select(3, column_of.long())


def _sample(**options: object) -> Sample:
    return Sample(lambda x: F.interpolate(x, **options), ((2, 3, 4, 5),))  # type: ignore[arg-type]


RULE = OpRule(
    name="upsample_nearest2d",
    aten=("aten.upsample_nearest2d.vec", "aten.upsample_nearest2d.default"),
    parse=parse_upsample(),
    compute=_compute,
    integer=IntegerForm(slots=("follow",), accepts_per_channel="axis1"),
    moves_values=True,
    samples=(_sample(scale_factor=2), _sample(scale_factor=(1.5, 2.3)), _sample(size=(7, 3))),
    refuses=(Refusal({"size": None, "factors": [2.0]}, ((1, 3, 4, 4),), "factors"),),
    aliases=("nn.upsampling", "upsample_nearest"),
)
