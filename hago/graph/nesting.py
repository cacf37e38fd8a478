"""Nesting: how a model's arguments and results are nested, written as torch's pytree writes it, and read safely.

torch reads such a text by importing what it names (`defaultdict` factories, enums). hago reads it here, so that
nothing is imported because a file says so.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from hago.errors import GraphError, did_you_mean, shortened

#: Containers by torch's name: the type, and of what type is what it knows beside its children.
_CONTAINERS: Final[Mapping[str, tuple[Any, tuple[type, ...]]]] = {
    "builtins.tuple": (tuple, (type(None),)),
    "builtins.list": (list, (type(None),)),
    "builtins.dict": (dict, (list,)),
    "collections.OrderedDict": (OrderedDict, (list,)),
    "collections.deque": (deque, (type(None), int)),
}
#: Containers that torch rebuilds by importing what the text names.
_IMPORTING: Final = frozenset({"collections.defaultdict"})
_INSTEAD: Final = "let the model take and return tensors, tuples, lists, and dicts whose keys are texts or numbers"
#: Containers within containers, at most.
_DEEPEST: Final = 64


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
        specs = (None if text is None else read_tree(text) for text in (arguments, results))
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
        first = args[0] if len(args) == 1 else None
        if isinstance(first, Mapping):  # a batch that is a dict
            args, kwargs = (), {**first, **kwargs}
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


def write_tree(spec: pytree.TreeSpec | None, verb: str) -> str | None:
    """The nesting of arguments or results as text; named tuples (torch.topk's result, say) as plain ones.

    Args:
        verb: what the model does with it, `takes` or `returns`, for the message.

    Raises:
        GraphError: torch has no text for it.
    """
    if spec is None:
        return None
    plain = pytree.tree_structure(_plain_tuples(pytree.tree_unflatten(range(spec.num_leaves), spec)))
    try:
        return pytree.treespec_dumps(plain)
    except NotImplementedError:
        kind = " ".join(str(plain).split())
        raise GraphError(
            f"the model {verb} {kind}, which hago cannot write down; use tuples, lists and dicts"
        ) from None


def _plain_tuples(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain_tuples, value))
    if type(value) is list:
        return [_plain_tuples(v) for v in value]
    return {k: _plain_tuples(v) for k, v in value.items()} if type(value) is dict else value


def read_tree(text: str) -> pytree.TreeSpec:
    """The nesting that `torch.utils._pytree.treespec_dumps` wrote, read without running anything.

    torch's own reader imports what the text names (enums as keys, factories of defaultdicts). This one knows tuples,
    lists, dicts, ordered dicts and deques whose keys are numbers or texts, and types that this process has registered
    with torch's pytree and that need nothing but such keys.

    Raises:
        GraphError: what is wrong, and what to do.
    """
    try:
        document = json.loads(text)
        if not (isinstance(document, list) and len(document) == 2 and document[0] == 1):
            raise GraphError("it is not of version 1 of torch's format")
        return _tree(document[1], 0)
    except (GraphError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise GraphError(f"the nesting of arguments or results cannot be read: {error}") from None


def _tree(spec: Any, depth: int) -> pytree.TreeSpec:
    if not isinstance(spec, dict) or set(spec) != {"type", "context", "children_spec"} or depth > _DEEPEST:
        raise GraphError(f"{shortened(spec)} at depth {depth}; expected a type, a context and children")
    name, context = spec["type"], spec["context"]
    if name is None:
        return pytree.tree_structure(0)
    children = [_tree(child, depth + 1) for child in spec["children_spec"]]
    kind, known = _container(name, context)
    if kind in (dict, OrderedDict) and len(set(known)) != len(children):
        raise GraphError(f"{len(known)} keys for {len(children)} values")
    return pytree.TreeSpec(kind, known, children)


def _container(name: Any, context: Any) -> tuple[Any, Any]:
    """A type of containers, and what it knows beside its children."""
    if name in _IMPORTING:
        raise GraphError(f"a {name} cannot be read without importing what it names; {_INSTEAD}")
    if not isinstance(context, str):
        raise GraphError(f"{shortened(name)} with the context {shortened(context)}; expected a text")
    if name == "collections.namedtuple":
        kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(context.strip('"'))
        if not (isinstance(kind, type) and issubclass(kind, tuple)):
            raise GraphError(f"no named tuple {shortened(context)} is known; import the module that defines it first")
        return namedtuple, kind
    found = _CONTAINERS.get(name) if isinstance(name, str) else None
    known = json.loads(context)
    keys = known if isinstance(known, list) else [known]
    if not all(key is None or isinstance(key, (str, int, float)) for key in keys):
        raise GraphError(
            f"{shortened(name)} has the keys {shortened(context)}, which cannot be read without importing what they "
            f"name; {_INSTEAD}"
        )
    if found is None:
        return _registered(name), known
    kind, wanted = found
    if type(known) not in wanted:
        raise GraphError(f"a {kind.__name__} with {shortened(context)}")
    return kind, known


def _registered(name: Any) -> type:
    """A type that this process has registered, and that reads nothing but plain keys."""
    kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name) if isinstance(name, str) else None
    how = None if kind is None else pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if not isinstance(kind, type) or name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND or how is None:
        raise GraphError(
            f"this process does not know the type {shortened(name)}; import the module that defines it first"
        )
    if how.from_dumpable_context is not None:
        raise GraphError(f"a {shortened(name)} cannot be read without importing what it names; {_INSTEAD}")
    return kind
