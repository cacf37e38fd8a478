"""Run a Graph node by node (`run_graph`), run it as the float model (`run_real`), and check its inputs.

`run_graph` is called by calibration, gradients, training and the integer model, each with a function of its own that
computes a node. It runs the schedule that the graph keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hago.data import Batches, as_tensor
from hago.errors import DataError, GraphError, HagoError
from hago.graph.graph import Graph, Node
from hago.graph.nesting import Nesting, read_tree
from hago.graph.schedule import run_schedule
from hago.ops import OPS, Ops, opaque
from hago.serialization.tensor_file import dtype_name

#: Computes a node from the values of its inputs.
NodeFunction = Callable[[Node, Sequence[Any]], Any]


def run_graph(
    graph: Graph,
    inputs: Sequence[Tensor],
    step: NodeFunction,
    *,
    consts: Mapping[str, Any] | None = None,
    on_value: Callable[[Node, Any], None] | None = None,
) -> list[Any]:
    """Run every node once, in order.

    Args:
        inputs: one per graph input.
        step: computes a node; it is not called for inputs and constants.
        consts: values of the constant nodes; by default the graph's own.
        on_value: called with every input, and with every computed value as soon as it exists.

    Returns:
        The values of the graph's outputs.
    """
    values: dict[str, Any] = {**(graph.consts if consts is None else consts)}
    values.update(zip(graph.inputs, inputs, strict=True))
    if on_value is not None:
        for name in graph.inputs:
            on_value(graph[name], values[name])
    on_outputs = None if on_value is None else lambda node, outputs: on_value(node, outputs[0])
    run_schedule(graph.schedule, values, lambda node, read: (step(node, read),), on_outputs)
    return [values[name] for name in graph.outputs]


def compute_real(node: Node, values: Sequence[Any], ops: Ops = OPS) -> Any:
    """Compute a node on real values, as torch does.

    Raises:
        GraphError: torch raises an error; names the node and its attributes.
    """
    rule = ops.get(node.op)
    try:
        if rule is not None:
            return rule.compute(node.attrs, *values)
        return _with_gradients_if_any(opaque.compute(node.attrs, *values))
    except HagoError:
        raise
    except Exception as error:
        shapes = [tuple(v.shape) if isinstance(v, Tensor) else v for v in values]
        # the rest of torch's message lists its registered backends, over many lines
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise GraphError(f"node {node} cannot be computed on shapes {shapes}: {first}") from error


def _with_gradients_if_any(value: Any) -> Any:
    """A value without gradients where torch has none for its op, such as a step: what is before it then gets none."""
    made_by = value.grad_fn if isinstance(value, Tensor) else None
    return value if made_by is None or not made_by.name().endswith("NotImplemented") else value.detach()


def laid_out(value: Any) -> Any:
    """A tensor in contiguous layout, in which all engines compute the same bits; other values unchanged."""
    return value.contiguous() if isinstance(value, Tensor) else value


def compute_laid_out(node: Node, values: Sequence[Any], ops: Ops = OPS) -> Any:
    """`compute_real` with a result that does not depend on the layouts of the values, as every engine computes float
    nodes."""
    rule = ops.get(node.op)
    return compute_real(node, values if rule is not None and rule.any_layout else [laid_out(v) for v in values], ops)


def run_real(
    graph: Graph, inputs: Sequence[Tensor], on_value: Callable[[Node, Any], None] | None = None, ops: Ops = OPS
) -> list[Any]:
    """Run the float model without gradients; see `run_graph`."""
    with torch.no_grad(), autocast_off():
        return run_graph(graph, inputs, lambda n, v: compute_real(n, v, ops), on_value=on_value)


@contextmanager
def autocast_off() -> Iterator[None]:
    """A context without torch's automatic casts, which the caller may have on: in bfloat16, sums of integers and the
    float model would be others."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            yield
    else:
        yield


def channels_last(x: Tensor) -> Tensor:
    """A tensor in channels-last layout, in which convolutions are fastest; one that is not 4-dimensional unchanged."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def over_samples(value: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """The first axis reduced to one entry.

    Entries are read in the order of memory: over the first axis of values in channels-last layout, torch takes 30 times
    as long.

    Args:
        reduce: such as `torch.sum`, `torch.mean` or `torch.amax`.
    """
    if value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last):
        rows = value.movedim(1, -1)
        return reduce(rows.flatten(1), 0).view(1, *rows.shape[1:]).movedim(-1, 1)
    return reduce(value, 0, keepdim=True) if value.ndim else value


# ---------------------------------------------------------------- shapes and dtypes
def infer_shape(node: Node, shapes: Sequence[tuple[int, ...]], ops: Ops = OPS) -> tuple[int, ...]:
    """The shape of a node's value from those of its inputs, by running it on meta tensors.

    Raises:
        GraphError: the attributes do not fit the shapes.
    """
    values = [torch.empty(s, device="meta") for s in shapes]
    return tuple(compute_real(node, values, ops).shape)


def run_without_values(
    graph: Graph, ops: Ops = OPS, on_value: Callable[[Node, Any], None] | None = None, batch: int = 1
) -> list[Any]:
    """Run a graph on tensors that have a shape and a dtype, and no values; its outputs.

    Args:
        on_value: called with every input and every computed value.
        batch: the size of the first axis of inputs where it is 1.

    Raises:
        GraphError: an input is of a dtype or shape that no tensor has, or a node cannot be computed; names it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        inputs = [_without_values(graph[name], batch) for name in graph.inputs]
        consts = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in graph.consts.items()}
        return run_graph(graph, inputs, lambda n, v: compute_real(n, v, ops), consts=consts, on_value=on_value)


def takes_any_batch(graph: Graph, ops: Ops = OPS) -> bool:
    """Whether a graph computes as many samples as it is given; a program of `torch.export` may fix their number."""
    batch = 3
    if not all((graph[name].shape or (0,))[0] == 1 for name in graph.inputs):
        return False
    try:
        outputs = run_without_values(graph, ops, batch=batch)
    except Exception:  # torch raises whatever it meets, without values
        return False
    return all(isinstance(o, Tensor) and o.ndim > 0 and o.shape[0] == batch for o in outputs)


def _without_values(node: Node, batch: int) -> Tensor:
    shape = node.shape or ()
    try:
        return torch.empty((batch, *shape[1:]) if shape[:1] == (1,) else shape, dtype=node.torch_dtype)
    except Exception as error:
        raise GraphError(f"input {node.name!r} cannot be a tensor of {node.dtype} and shape {node.shape}") from error


def infer_dtypes(graph: Graph, ops: Ops = OPS) -> Graph:
    """The graph with a dtype on every node whose value is a tensor; itself if they have one already.

    The frontend and the passes state dtypes. Those of a graph that was built by hand, or read from a stored model,
    which does not hold them, are found by running it without values.

    Raises:
        GraphError: a node cannot be computed; names it.
    """
    if all(node.dtype is not None or node.shape is None for node in graph):
        return graph
    dtypes: dict[str, str] = {}

    def on_value(node: Node, value: Any) -> None:
        if isinstance(value, Tensor):
            dtypes[node.name] = dtype_name(value.dtype)

    run_without_values(graph, ops, on_value)
    return replace(graph, nodes=tuple(replace(n, dtype=dtypes.get(n.name, n.dtype)) for n in graph))


def flatten_inputs(graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Call arguments as the tensors of the graph's inputs, checked.

    Raises:
        GraphError: the wrong number, nesting, shape, name or kind of arguments.
    """
    return check_inputs(graph, nesting_of(graph).leaves(args, kwargs))


def check_inputs(graph: Graph, leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors among flat arguments, if they are what the graph's inputs take. Arrays and real numbers of other
    widths are converted as calibration converts them.

    Raises:
        GraphError: the wrong number, shape or kind of tensors, or NaN.
    """
    tensors = [as_tensor(x, "an input") for x in leaves if isinstance(x, (Tensor, np.ndarray))]
    check_kinds(graph, tensors)
    if torch.compiler.is_exporting():
        return tensors  # a program of torch.export takes any batch, and has no branch on values
    for name, tensor in zip(graph.inputs, tensors, strict=True):
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise GraphError(f"input {name!r} holds NaN, which no integer stands for")
    sizes = {len(t) for n, t in zip(graph.inputs, tensors, strict=True) if (graph[n].shape or (0,))[0] == 1}
    if len(sizes - {1}) > 1:
        raise GraphError(f"inputs have batch sizes {sorted(sizes)}; expected one, or 1")
    return tensors


def check_kinds(graph: Graph, tensors: Sequence[Tensor]) -> None:
    """Check number, shapes and dtypes of a graph's inputs.

    Raises:
        GraphError: more or fewer, another shape than the input's, integers for a float input, or the other way round.
    """
    if len(tensors) != len(graph.inputs):
        raise GraphError(f"the model takes {len(graph.inputs)} tensors ({', '.join(graph.inputs)}), got {len(tensors)}")
    for name, tensor in zip(graph.inputs, tensors, strict=True):
        node = graph[name]
        if node.shape is not None and tuple(tensor.shape[1:]) != tuple(node.shape[1:]):
            sizes = ", ".join(map(str, node.shape[1:]))
            raise GraphError(f"input {name!r} has shape {tuple(tensor.shape)}; expected (batch, {sizes})")
        expected = node.torch_dtype
        if tensor.dtype != expected and (tensor.is_floating_point() or expected.is_floating_point):
            raise GraphError(
                f"input {name!r} is {tensor.dtype}; the model takes {expected}: convert it as the calibration data "
                f"was, e.g. {'images.float() / 255' if expected.is_floating_point else f'.to({expected})'}"
            )


def check_batches(graph: Graph, batches: Batches) -> None:
    """Check that data has the shapes and dtypes of a graph's inputs. Only the first batch is read, since all batches
    are alike.

    Raises:
        DataError: another shape or dtype than expected.
    """
    try:
        check_kinds(graph, next(iter(batches)).inputs)
    except GraphError as error:
        raise DataError(f"{batches.title} is not what the model takes: {error}") from None


def nesting_of(graph: Graph) -> Nesting:
    """How a graph's arguments and results are nested."""
    return Nesting.read(graph.inputs, graph.in_spec, graph.out_spec)


def nest_outputs(graph: Graph, values: Sequence[Any]) -> Any:
    """The outputs as the model returns them: one tensor, a tuple, or a nested structure."""
    return nesting_of(graph).nested(values)


def example_inputs(graph: Graph, batch: int = 2) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Zeros in the shapes, dtypes and nesting of a graph's inputs: (args, kwargs).

    Raises:
        GraphError: the model also takes arguments that are not tensors.
    """
    leaves = [_zeros(graph[name], batch) for name in graph.inputs]
    if graph.in_spec is None:
        return tuple(leaves), {}
    spec = read_tree(graph.in_spec)
    if spec.num_leaves != len(leaves):
        raise GraphError("the model takes arguments that are not tensors; pass example_inputs")
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return tuple(args), dict(kwargs)


def _zeros(node: Node, batch: int) -> Tensor:
    shape = node.shape or ()
    return torch.zeros((batch, *shape[1:]), dtype=node.torch_dtype)
