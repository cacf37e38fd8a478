"""elu: `x` where positive, else `alpha * (exp(x) - 1)`."""

import torch.nn.functional as F

from hago.ops._elementwise import elementwise_rule
from hago.ops._rule import Call, Parsed
from hago.ops._shared import arguments


def _parse(call: Call) -> Parsed | None:
    if call["scale"] != 1 or call["input_scale"] != 1:
        return None
    return arguments(("self",), ("alpha",))(call)


RULE = elementwise_rule("elu", F.elu, options=({}, {"alpha": 0.5}), parse=_parse)
