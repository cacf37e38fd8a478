"""upsample_bilinear2d: pixels weighted by their distance; float everywhere."""

import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, OpRule, Refusal, Sample
from hago.ops._upsample import interpolation, parse_upsample


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    corners = attrs["align_corners"]
    return F.interpolate(x, **interpolation(attrs), mode="bilinear", align_corners=corners)


def _sample(**options: object) -> Sample:
    shape = (2, 3, 4, 5)
    return Sample(lambda x: F.interpolate(x, mode="bilinear", **options), (shape,))  # type: ignore[arg-type]


RULE = OpRule(
    name="upsample_bilinear2d",
    aten=("aten.upsample_bilinear2d.vec", "aten.upsample_bilinear2d.default"),
    parse=parse_upsample("align_corners"),
    compute=_compute,
    clips_or_averages=True,
    samples=(_sample(scale_factor=2), _sample(size=(7, 3), align_corners=True)),
    refuses=(Refusal({"size": [4], "factors": None, "align_corners": False}, ((1, 3, 4, 4),), "size"),),
    aliases=("upsample_bilinear",),
)
