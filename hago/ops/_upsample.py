"""Arguments of upsampling ops: a target size, or a factor per axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hago.ops._rule import Attrs, Call, Parsed, Ref
from hago.ops._shared import has_ref, plain


def parse_upsample(*extra: str) -> Callable[[Call], Parsed | None]:
    """A `parse` for both spellings; `extra` arguments are kept as attributes."""

    def parse(call: Call) -> Parsed | None:
        x = call.arguments.get("input", call.arguments.get("self"))
        if has_ref(call["output_size"]) or any(call.arguments.get(s) for s in ("scales_h", "scales_w")):
            return None
        attrs = {"size": plain(call["output_size"]), "factors": plain(call.arguments.get("scale_factors"))}
        assert isinstance(x, Ref)
        return Parsed((x,), attrs | {e: call[e] for e in extra})

    return parse


def interpolation(attrs: Attrs) -> dict[str, Any]:
    """The arguments of `F.interpolate`."""
    return {"size": attrs["size"], "scale_factor": attrs["factors"]}
