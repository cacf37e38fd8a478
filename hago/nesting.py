"""Nesting: how a model's arguments and results are nested, as torch's pytree writes it, read safely.

torch reads such a text by importing what it names (`defaultdict` factories, enums). A text that comes
out of a file is checked here first, so that nothing is imported because a file says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from hago.errors import GraphError, did_you_mean

#: Containers that torch rebuilds by importing what the text names.
_IMPORTING: Final = frozenset({"collections.defaultdict"})


@dataclass(frozen=True, slots=True)
class Nesting:
    """How the arguments and the results of a model are nested, in a form that torch.compile can follow.

    Args:
        inputs: the names of the tensors among the arguments, in order.
        arguments, results: None where they are not nested.
    """

    inputs: tuple[str, ...]
    arguments: pytree.TreeSpec | None
    results: pytree.TreeSpec | None

    @classmethod
    def read(cls, inputs: Sequence[str], arguments: str | None, results: str | None) -> Nesting:
        """From what torch's pytree wrote."""
        specs = (None if text is None else pytree.treespec_loads(text) for text in (arguments, results))
        return cls(tuple(inputs), *specs)

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """What the arguments hold, in the order of the inputs, whatever order a dict has.

        Raises:
            GraphError: an argument of a name that the model does not take.
        """
        if self.arguments is not None:
            try:
                return self.arguments.flatten_up_to((tuple(args), dict(kwargs)))
            except ValueError:
                pass  # nested otherwise than exported: an argument given by name or by position instead
        leaves = pytree.tree_leaves(tuple(args))
        left = self.inputs[sum(isinstance(x, (Tensor, np.ndarray)) for x in leaves) :]
        for name in kwargs:
            if name not in left:
                raise GraphError(
                    f"the model takes no further argument {name!r}; its inputs are {', '.join(self.inputs)}."
                    + did_you_mean(name, left)
                )
        return [*leaves, *(kwargs[name] for name in left if name in kwargs)]

    def nested(self, values: Sequence[Any]) -> Any:
        """Results as the model returns them: one tensor, a tuple, or a nested structure."""
        if self.results is not None:
            return pytree.tree_unflatten(list(values), self.results)
        return values[0] if len(values) == 1 else tuple(values)


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
