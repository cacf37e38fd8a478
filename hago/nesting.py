"""Nesting: how a model's arguments and results are nested, as torch's pytree writes it, read safely.

torch reads such a text by importing what it names (`defaultdict` factories, enums). A text that comes
out of a file is checked here first, so that nothing is imported because a file says so.
"""

from __future__ import annotations

import json
from typing import Any, Final

from torch.utils import _pytree as pytree

from hago.errors import GraphError

#: Containers that torch rebuilds by importing what the text names.
_IMPORTING: Final = frozenset({"collections.defaultdict"})


def check_nesting(text: str) -> None:
    """Refuse a text that torch could not read, or would import something for.

    Raises:
        GraphError: what is wrong, and what to do.
    """
    try:
        _protocol, spec = json.loads(text)
        _check(spec)
        pytree.treespec_loads(text)
    except GraphError:
        raise
    except NotImplementedError as error:
        raise GraphError(
            f"arguments or results are nested in a type that this process does not know ({error}); import the "
            "module that defines it first"
        ) from None
    except Exception as error:  # torch's pytree raises whatever it meets
        raise GraphError(f"the nesting of arguments or results cannot be read: {error}") from None


def _check(spec: Any) -> None:
    kind, context = spec["type"], spec["context"]
    if kind in _IMPORTING or "__enum__" in json.dumps(context):
        raise GraphError(
            f"arguments or results are nested in {kind} with {str(context)[:60]}, which cannot be read without "
            "importing what it names; let the model take and return tensors, tuples, lists and dicts"
        )
    for child in spec["children_spec"]:
        _check(child)
