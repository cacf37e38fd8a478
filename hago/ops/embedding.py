"""embedding: rows of a table picked by indices."""

import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, IntegerForm, OpRule, Sample
from hago.ops._shared import arguments, as_index


def _compute(attrs: Attrs, table: Tensor, indices: Tensor) -> Tensor:
    return F.embedding(as_index(indices), table)


RULE = OpRule(
    name="embedding",
    aten=("aten.embedding.default",),
    parse=arguments(("weight", "indices")),
    compute=_compute,
    integer=IntegerForm(slots=("own", "plain")),
    moves_values=True,
    samples=(
        Sample(F.embedding, ((2, 5), (7, 4)), consts=(1,), high=7, indices=(0,)),
        Sample(lambda i, w: F.embedding(i, w, 0), ((2,), (7, 4)), consts=(1,), high=7, indices=(0,)),
    ),
    aliases=("nn.embedding",),
)
