"""The rule of elementwise nonlinearities such as sigmoid, silu and gelu.

On integers such an op is a table with one entry per input integer. So the function, whatever its shape, is only
ever evaluated on real values, and its output is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Sample
from hago.ops._shared import arguments


def elementwise_rule(
    name: str,
    fn: Callable[..., Tensor],
    attrs: Sequence[str] = (),
    options: Sequence[dict[str, Any]] = ({},),
    parse: Callable[[Call], Parsed | None] | None = None,
    forms: Mapping[str, IntegerForm] | None = None,
) -> OpRule:
    """The rule of an elementwise function.

    Args:
        fn: the function on real values; takes a tensor, and `attrs` by keyword.
        attrs: names of arguments that the ATen call and `fn` share.
        options: keyword arguments of `fn`, for one sample each.
        parse: for an ATen call with arguments that `fn` does not have.
        forms: integer sides other than a lookup table.
    """

    def compute(attrs: Attrs, x: Tensor) -> Tensor:
        return fn(x, **attrs)

    def sample(chosen: dict[str, Any]) -> Sample:
        return Sample(lambda x: fn(x, **chosen), ((2, 3, 4, 4),), low=-6.0, high=6.0)

    return OpRule(
        name=name,
        aten=(f"aten.{name}.default",),
        parse=parse or arguments(("self",), attrs),
        compute=compute,
        integer=IntegerForm(slots=("own",), table=True),
        forms=forms or {},
        samples=tuple(sample(o) for o in options),
        aliases=(f"nn.{name}",),
    )
