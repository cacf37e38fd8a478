"""mean: over axes other than the batch; on integers the sum, with the scale divided by the count."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hago.ops._reduce import reduce_rule, total
from hago.ops._rule import Attrs
from hago.ops.forms.tflite import tflite_mean


def _scale(attrs: Attrs, scales: Sequence[Tensor]) -> Tensor:
    return torch.div(scales[0], attrs["count"])


RULE = reduce_rule("mean", "aten.mean.dim", torch.mean, _scale, {"tflite": tflite_mean(total)}, averages=True)
