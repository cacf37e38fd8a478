"""From an nn.Module or ExportedProgram to a Graph: `from_torch` exports the model and imports its calls.

torch's own graph is not kept: it holds in-place ops, its node names change between versions, and its full decomposition
turns `linear` into two calls. So `run_decompositions({})` makes it functional where that changes what is read
(`hago.graph.frontend.tracing`). Names come from module paths, and every call is read once, by the rule of its op. Calls
that no rule reads become opaque nodes. Whole numbers and conditions that take part in real arithmetic are converted
first, as torch promotes them, so that a rule computes on real values alone.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Node as FxNode
from torch.utils import _pytree as pytree

from hago.data import as_tensor
from hago.errors import GraphError, as_strings
from hago.garbage_collection import garbage_collection_paused
from hago.graph.execute import autocast_off
from hago.graph.frontend.calls import copies_to_reshape, dtype_of, first_of, is_check, named_arguments, open_axes_of
from hago.graph.frontend.composites import any_short, decompositions
from hago.graph.frontend.export_failure import quiet_on_failure, why_not_exported
from hago.graph.frontend.input_diagnosis import check_runs
from hago.graph.frontend.tracing import expands_as, reads_as_it_is, traced_again
from hago.graph.frontend.writes import is_idle_dropout, without_writing
from hago.graph.graph import CONST, INPUT, Graph, Node
from hago.graph.nesting import write_tree
from hago.graph.passes import PassOptions, apply_before_folding, apply_from_folding, import_versions
from hago.ops import OPS, Call, OpRule, Ops, Parsed, Ref, has_ref, opaque, parsers
from hago.serialization.tensor_file import dtype_name


def is_reading(fx: FxNode) -> bool:
    """Whether a call reads off a size, or one of several results."""
    return fx.target is operator.getitem or str(fx.target) == "aten.sym_size.int"


def is_integral(fx: FxNode) -> bool:
    """Whether a call gives indices, sizes or conditions, whose arithmetic is torch's own."""
    value = first_of(fx.meta.get("val"))
    return isinstance(value, Tensor) and not value.is_floating_point()


def module_path(fx: FxNode) -> str:
    """The path of the module that the call stands in; empty at the top of the model."""
    stack = list((fx.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return "" if path.startswith("_empty") else path


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory read in the same way."""
    if not tensor.numel():
        return (id(tensor),)
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape at batch 1: every size that export left open is read with its symbols at 1."""
    return tuple(_size(s) for s in value.shape) if isinstance(value, Tensor) else None


def _size(size: Any) -> int:
    """A size at batch 1.

    Raises:
        GraphError: a single sample has no entries there, or not a whole number.
    """
    if isinstance(size, int):
        return size
    expr = size.node.expr
    try:
        at_one = int(expr.subs(dict.fromkeys(expr.free_symbols, 1)))
    except (ZeroDivisionError, TypeError, ValueError):
        at_one = 0
    if at_one < 1:
        text = str(expr)
        for symbol in expr.free_symbols:
            text = text.replace(str(symbol), "n")
        raise GraphError(
            f"the model makes values of size {text} of n samples, which a single sample has not; let forward treat "
            "every sample alike, whatever their number (no halves or pairs of a batch)"
        )
    return at_one


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse weights that are NaN or infinite.

    Raises:
        GraphError: naming the parameter, and how many.
    """
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise GraphError(f"{name!r} holds {bad} NaN or infinite values of {tensor.numel()}; check the weights")


# ---------------------------------------------------------------- importing calls

#: Calls that give their first argument back, in eval mode.
_IDENTITIES: Final = frozenset(
    f"aten.{n}.default"
    for n in ("alias", "clone", "contiguous", "detach", "detach_", "dropout", "feature_dropout", "alpha_dropout",
              "lift_fresh_copy", "_assert_tensor_metadata")
)  # fmt: skip
#: Calls that give new sizes, and the argument that is to say them: the one that depends on the batch as -1.
_SIZES: Final = {
    "aten.view.default": "size",
    "aten._unsafe_view.default": "size",
    "aten.reshape.default": "shape",
    "aten.flatten.using_ints": "size",
    "aten.reshape_as.default": "shape",
}

#: Calls that repeat axes of size 1.
_EXPANSIONS: Final = ("aten.expand.default", "aten.expand_as.default")

#: Calls that make a tensor of nothing but numbers; random ones are none of them.
_FILLED: Final = frozenset(
    f"aten.{n}"
    for n in ("arange.default", "arange.start", "arange.start_step", "eye.default", "eye.m", "full.default",
              "linspace.default", "ones.default", "scalar_tensor.default", "zeros.default")
)  # fmt: skip
#: Calls that do so in the dtype of a tensor that they do not read, and the number that they fill with.
_FILLED_LIKE: Final = {"aten.new_zeros.default": 0, "aten.new_ones.default": 1, "aten.new_full.default": None}
#: Ops that only move values: they are read on indices and conditions too.
_OF_ANY_DTYPE: Final = frozenset(
    {"concat", "expand", "index", "permute", "reshape", "select", "slice", "squeeze", "stack", "to", "unsqueeze"}
)


class Importer:
    """Reads one ExportedProgram. Lives for one import; `run` gives the Graph.

    Args:
        converts: False to import as the first version of hago did, for the hashes in its strategies and logs. True
            also converts operands that torch promotes, drops empty operands of a concatenation, decomposes composite
            calls, folds calls on constants with several results, and reads an expansion that keeps the batch.

    Attributes:
        converted: whether any of this changed the Graph.
    """

    def __init__(self, program: ExportedProgram, ops: Ops = OPS, *, converts: bool = True) -> None:
        self.ops = ops
        self.converts = converts
        self.parsers = parsers(ops)
        known = self.parsers.keys() | _IDENTITIES
        decomposed: set[str] = set()
        short = any_short(program) if converts else expands_as(program)
        if short or not reads_as_it_is(program, known):
            program = traced_again(program, decompositions(decomposed) if converts else {})
        self.program = program
        self.converted = bool(decomposed)
        self.nodes: list[Node] = []
        self.consts: dict[str, Tensor] = {}
        self.several: dict[str, Any] = {}  # what calls on constants alone give, where it is no tensor
        self.learned: set[str] = set()  # constants that are parameters and take a gradient, or are made of them
        self.shapes: dict[str, tuple[int, ...] | None] = {}
        self.dtypes: dict[str, torch.dtype | None] = {}
        self.open_axes: dict[str, tuple[int, ...]] = {}
        self.values: dict[FxNode, Any] = {}  # fx node -> Ref, number, or None
        self.parts: dict[FxNode, tuple[str, dict[Any, Parsed]]] = {}  # calls with several results
        self.paths = self._count_paths()
        self.taken: set[str] = {"output"}

    def run(self) -> Graph:
        inputs = self._placeholders()
        outputs: tuple[str, ...] = ()
        for fx in self.program.graph.nodes:
            if fx.op == "call_function":
                self.values[fx] = self._call(fx)
            elif fx.op == "output":
                outputs = self._outputs(fx)
            elif fx.op == "get_attr":
                raise GraphError(
                    f"the model branches or loops on values ({fx.target}); hago imports no control flow: choose "
                    "between values with torch.where(condition, a, b)"
                )
            elif fx.op != "placeholder":
                raise GraphError(f"{fx.name} ({fx.op} {fx.target}) cannot be imported; only ATen calls can")
        kept = _reachable(self.nodes, outputs, inputs)
        consts = {k: v for k, v in self.consts.items() if k in kept}
        spec = self.program.call_spec
        return Graph(
            tuple(n for n in self.nodes if n.name in kept),
            tuple(inputs),
            outputs,
            consts,
            write_tree(spec.in_spec, "takes"),
            write_tree(spec.out_spec, "returns"),
            untrained=frozenset(consts.keys() - self.learned),
        )

    # ------------------------------------------------------------ inputs, constants, outputs
    def _placeholders(self) -> list[str]:
        tensors = {**self.program.state_dict, **self.program.constants}
        inputs: list[str] = []
        shared: dict[tuple[Any, ...], Ref] = {}
        placeholders = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        for fx, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            if spec.kind == InputKind.USER_INPUT:
                if isinstance(spec.arg, ConstantArgument):
                    self.values[fx] = spec.arg.value
                    continue
                self.values[fx] = self._input(fx)
                inputs.append(self.values[fx].name)
                continue
            if spec.target not in tensors or not isinstance(tensors[spec.target], Tensor):
                raise GraphError(f"{spec.target!r} ({spec.kind.name.lower()}) is not a tensor and cannot be imported")
            tensor = tensors[spec.target].detach()
            if spec.kind == InputKind.PARAMETER:
                check_finite(spec.target, tensor)
            # parameters that share storage are one constant: shared weights stay shared
            key = identity(tensor)
            if key not in shared:
                shared[key] = self._const(spec.target, tensor)
            if spec.kind == InputKind.PARAMETER and tensors[spec.target].requires_grad:
                self.learned.add(shared[key].name)
            self.values[fx] = shared[key]
        return inputs

    def _input(self, fx: FxNode) -> Ref:
        value = fx.meta["val"]
        if not isinstance(value, Tensor):
            raise GraphError(f"input {fx.name!r} is a {type(value).__name__}; hago takes tensors and constants")
        if any(axis > 0 for axis in open_axes_of(value)):
            sizes = tuple(size if isinstance(size, int) else "?" for size in value.shape)
            raise GraphError(
                f"input {fx.name!r} has the shape ({', '.join(map(str, sizes))}), which is open along another axis "
                "than the first; export the model with the sizes that it runs on, and only the batch dynamic"
            )
        attrs = {"dtype": dtype_name(value.dtype)}
        return self._add(self._unique(fx.name), INPUT, (), attrs, value)

    def _const(self, name: str, tensor: Tensor) -> Ref:
        name = self._unique(name)
        self.consts[name] = tensor
        return self._add(name, CONST, (), {}, tensor)

    def _outputs(self, fx: FxNode) -> tuple[str, ...]:
        found = []
        for value, spec in zip(fx.args[0], self.program.graph_signature.output_specs, strict=True):  # type: ignore[arg-type]
            if spec.kind == OutputKind.USER_INPUT_MUTATION:
                raise GraphError(
                    f"the model writes to its input {spec.target!r}; let forward leave inputs as they are, by "
                    "x = x + 1 in place of x += 1, say"
                )
            if spec.kind != OutputKind.USER_OUTPUT:
                raise GraphError(
                    f"the model writes to {spec.target!r} when run; call model.eval() and export again, or let forward "
                    "leave its buffers as they are"
                )
            made = self.values.get(value) if isinstance(value, FxNode) else value
            if not isinstance(made, Ref):
                raise GraphError(f"the model returns {value!r}, which is not a tensor")
            found.append(made.name)
        return tuple(found)

    # ------------------------------------------------------------ calls
    def _call(self, fx: FxNode) -> Any:
        target = opaque.target_name(fx.target) if not is_check(fx) else ""
        if not target:
            return None
        target = without_writing(fx, target)
        if target in _IDENTITIES:
            return self._value(fx.args[0])
        whole: Any = fx.args[0] if fx.args else None
        if target == "operator.getitem" and whole in self.parts:
            op, parts = self.parts[whole]
            return self._fold_constant(self._node(fx, op, parts[fx.args[1]]))
        rule = self.parsers.get(target)
        if rule is not None and is_integral(fx) and rule.name not in _OF_ANY_DTYPE:
            rule = None
        if isinstance(fx.meta.get("val"), (tuple, list)):
            read = self._parse_parts(fx, target, rule)
            if rule is not None and read is not None:
                self.parts[fx] = (rule.name, read)
                return None
            return self._fold_constant(self.opaque(fx, target))
        parsed = rule.parse(self._read(fx, target)) if rule else None
        made = self.opaque(fx, target) if rule is None or parsed is None else self._node(fx, rule.name, parsed)
        return self._fold_constant(made)

    def _parse_parts(self, fx: FxNode, target: str, rule: OpRule | None) -> dict[Any, Parsed] | None:
        """What each used result of a call means (a split's parts, batch norm's first), or None."""
        if rule is None or any(u.target is not operator.getitem for u in fx.users):
            return None
        items: set[Any] = {u.args[1] for u in fx.users}
        parsed = {i: rule.parse(replace(self._read(fx, target), item=i)) for i in items}
        return {i: p for i, p in parsed.items() if p is not None} if all(parsed.values()) else None

    def _read(self, fx: FxNode, target: str) -> Call:
        arguments = dict(named_arguments(fx))
        read = {k: self._value(v) for k, v in arguments.items()}
        result = first_of(fx.meta.get("val"))
        if target in _SIZES and len(open_axes_of(result)) <= 1:
            read[_SIZES[target]] = [s if isinstance(s, int) else -1 for s in result.shape]
        if target == "aten.expand_as.default":
            read["size"] = [s if isinstance(s, int) else read["other"] for s in result.shape]
        if self.converts and target in _EXPANSIONS and has_ref(read["size"]):
            read["size"] = self._kept_sizes(read["self"], read["size"])
        return Call(target, read, self.shapes, shape_of(result), open_axes=self.open_axes)

    def _kept_sizes(self, operand: Ref, size: Sequence[Any]) -> list[Any]:
        """The size of an expansion, -1 for axes whose size depends on the batch in the operand already."""
        added = len(size) - len(self.shapes[operand.name] or ())
        kept = {axis + added for axis in self.open_axes[operand.name]}
        self.converted = self.converted or bool(kept)
        return [-1 if axis in kept else s for axis, s in enumerate(size)]

    def _value(self, value: Any) -> Any:
        if isinstance(value, FxNode):
            return self.values[value]
        if isinstance(value, (list, tuple)):
            return [self._value(v) for v in value]
        return value

    def _node(self, fx: FxNode, op: str, parsed: Parsed) -> Ref:
        if op == "slice" and parsed.attrs == {**parsed.attrs, "start": 0, "stop": None, "step": 1}:
            whole = parsed.inputs[0]
            assert isinstance(whole, Ref)
            return whole
        result = dtype_of(fx.meta.get("val"))
        if op == "concat" and self.converts and (kept := self._not_empty(parsed, result)) != parsed.inputs:
            self.converted = True
            if len(kept) == 1:
                return kept[0]
            parsed = replace(parsed, inputs=kept)
        name = self._name(fx, op)
        inputs = [self._operand(name, op, slot, i, result).name for slot, i in enumerate(parsed.inputs)]
        return self._add(name, op, tuple(inputs), parsed.attrs, first_of(fx.meta.get("val")))

    def _not_empty(self, parsed: Parsed, result: torch.dtype | None) -> tuple[Ref, ...]:
        """The operands that hold anything (a cache of keys begins empty); all of them where only these have the dtype
        of the result."""
        refs = tuple(i for i in parsed.inputs if isinstance(i, Ref))
        kept = tuple(i for i in refs if 0 not in (self.shapes[i.name] or ()))
        return kept if any(self.dtypes[i.name] == result for i in kept) else refs

    def _operand(self, name: str, op: str, slot: int, operand: Ref | Tensor, result: torch.dtype | None) -> Ref:
        """What a node reads in a slot: a number as a constant, and a value of another dtype than its real result as
        torch promotes it, where the slot can be quantized."""
        if not isinstance(operand, Ref):
            return self._const(f"{name}.{slot}", operand)
        own = self.dtypes.get(operand.name)
        if not self.converts or op == "to" or result != torch.float32 or own in (None, result):
            return operand
        rule = self.ops[op]
        forms = [*([] if rule.integer is None else [rule.integer]), *rule.forms.values()]
        if all(form.slot(slot) == "plain" for form in forms):
            return operand
        self.converted = True
        if operand.name in self.consts:
            converted = self._const(f"{name}.{slot}", self.consts[operand.name].to(result))
            if operand.name in self.learned:
                self.learned.add(converted.name)
            return converted
        dtype = dtype_name(result)
        made = self._unique(f"{name}.{slot}")
        node = Node(made, "to", (operand.name,), {"dtype": dtype}, self.shapes[operand.name], dtype)
        return self._append(node, result, self.open_axes[operand.name])

    def opaque(self, fx: FxNode, target: str) -> Ref:
        if target in _FILLED_LIKE and not has_ref(sizes := self._value(fx.args[1])):
            number: Any = fx.args[2] if _FILLED_LIKE[target] is None else _FILLED_LIKE[target]
            name = self._name(fx, target.split(".")[1])
            return self._const(name, torch.full(sizes, number, dtype=fx.meta["val"].dtype))
        inputs: list[str] = []
        try:
            args = [opaque.pack(self._value(a), inputs) for a in fx.args]
            kwargs = {k: opaque.pack(self._value(v), inputs) for k, v in fx.kwargs.items()}
        except GraphError as error:
            raise GraphError(f"{target} at {module_path(fx) or 'the top of the model'}: {error}") from None
        attrs = {"target": target, "args": args, "kwargs": kwargs}
        name = self._name(fx, target.split(".")[1])
        return self._add(name, opaque.NAME, tuple(inputs), attrs, fx.meta.get("val"))

    def _fold_constant(self, made: Ref) -> Ref:
        """A node that reads constants only, or fills a tensor of a known size, is computed now and becomes one; of one
        with several results, those that are read (weights that are standardized when the model runs, say)."""
        node = self.nodes[-1]
        known = bool(node.inputs) or node.attrs.get("target") in _FILLED
        if node.name != made.name or not known or any(not (s in self.consts or s in self.several) for s in node.inputs):
            return made
        if not self.learned.isdisjoint(node.inputs):
            self.learned.add(node.name)
        values = [self.consts[s] if s in self.consts else self.several[s] for s in node.inputs]
        rule = self.ops.get(node.op)
        if node.shape is None:
            if self.converts and rule is None:
                self.several[node.name], self.converted = opaque.compute(node.attrs, *values), True
            return made
        value = (rule.compute if rule else opaque.compute)(node.attrs, *values)
        if not isinstance(value, Tensor):
            return made
        self.consts[node.name] = value.contiguous()
        self.nodes[-1] = Node(node.name, CONST, (), {}, tuple(value.shape))
        self.shapes[node.name] = tuple(value.shape)
        return made

    # ------------------------------------------------------------ names
    def _count_paths(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for fx in self.program.graph.nodes:
            if fx.op == "call_function" and not (is_check(fx) or is_reading(fx) or is_idle_dropout(fx)):
                # traced again, one that copies is two calls
                counts[module_path(fx)] = counts.get(module_path(fx), 0) + 1 + copies_to_reshape(fx)
        return counts

    def _name(self, fx: FxNode, op: str) -> str:
        """The module's path where the module is this one call, else path and op."""
        path = module_path(fx)
        if path and self.paths.get(path) == 1:
            return self._unique(path)
        return self._unique(f"{path}.{op}" if path else op)

    def _unique(self, name: str) -> str:
        name = name.replace(":", "_")
        found, count = name, 0
        while found in self.taken:
            count += 1
            found = f"{name}_{count}"
        self.taken.add(found)
        return found

    def _add(self, name: str, op: str, inputs: tuple[str, ...], attrs: Any, value: Any) -> Ref:
        dtype = dtype_name(value.dtype) if isinstance(value, Tensor) else None
        return self._append(Node(name, op, inputs, attrs, shape_of(value), dtype), dtype_of(value), open_axes_of(value))

    def _append(self, node: Node, dtype: torch.dtype | None, open_axes: tuple[int, ...]) -> Ref:
        self.shapes[node.name], self.dtypes[node.name], self.open_axes[node.name] = node.shape, dtype, open_axes
        self.nodes.append(node)
        return Ref(node.name)


def _reachable(nodes: Sequence[Node], outputs: Sequence[str], inputs: Sequence[str]) -> set[str]:
    kept = {*outputs, *inputs}
    for node in reversed(nodes):
        if node.name in kept:
            kept |= set(node.inputs)
    return kept


# ---------------------------------------------------------------- from a model

Attention = Literal["opened", "opened_unless_shared", "whole"]
ModelLike = nn.Module | ExportedProgram | Graph
#: The positional arguments of a model; a tensor or an array alone is the only one.
ExampleInputs = Sequence[Any] | Tensor | np.ndarray


def as_arguments(example_inputs: ExampleInputs) -> tuple[Any, ...]:
    """Example inputs as the positional arguments of a model."""
    return (example_inputs,) if isinstance(example_inputs, (Tensor, np.ndarray)) else tuple(example_inputs)


@garbage_collection_paused()
@autocast_off()
def from_torch(
    model: ModelLike,
    example_inputs: ExampleInputs = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    fold: bool = True,
    ops: Ops = OPS,
    attention: Attention = "opened",
    made_for: Collection[str] = (),
) -> Graph:
    """Import a model.

    Args:
        model: an nn.Module in eval mode that torch.export can export, an ExportedProgram, or a
            Graph (returned as it is).
        example_inputs, example_kwargs: arguments to export with; the first axis of every tensor is
            taken as the batch and left dynamic. A tensor or an array alone is the only argument.
        fold: fold batch norms into what stands before them, and apply the passes after that; see
            `hago.graph.passes`.
        attention: whether `scaled_dot_product_attention` is opened into products and a softmax, or kept whole;
            `opened_unless_shared` keeps whole what has shared heads (`enable_gqa`), whose products need more ops.
        made_for: model hashes of strategies and logs. If the graph that an earlier version of the import would give
            has one of them, it is returned: the first one converts no operands (see `Importer`), and each has the
            passes of its time.

    Raises:
        GraphError: the model is in training mode, cannot be exported, is not float32, or holds NaN
            or infinite parameters.
        DataError: the model fails on the example inputs.
    """
    made_for = as_strings(made_for, "made_for")
    if isinstance(model, Graph):
        return model
    program = (
        model if isinstance(model, ExportedProgram) else _export(model, as_arguments(example_inputs), example_kwargs)
    )
    importer = Importer(program, ops)
    imported = importer.run()
    options = PassOptions(
        ops=ops,
        opens_attention=attention != "whole",
        opens_shared_heads=attention == "opened",
        open_axes=importer.open_axes,
    )
    versions = import_versions(made_for)
    for version in versions:
        is_other = version == 1 and importer.converted
        unfolded = Importer(program, ops, converts=False).run() if is_other else imported
        unfolded = apply_before_folding(unfolded, options, version)
        if not fold and version == versions[-1]:
            return unfolded
        graph = apply_from_folding(unfolded, options, version)
        if made_for and graph.model_hash in made_for:
            break
    return graph if fold else unfolded


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> ExportedProgram:
    check_exportable(model)
    if not args and not kwargs:
        raise GraphError("example_inputs are needed to export an nn.Module; pass one batch")
    args, kwargs = pytree.tree_map(_example, (args, dict(kwargs or {})))
    dynamic = pytree.tree_map(_open_batch, (tuple(args), dict(kwargs)))
    shapes = {**_positional(model, dynamic[0]), **dynamic[1]}
    try:
        with warnings.catch_warnings(), torch.no_grad(), quiet_on_failure():
            warnings.simplefilter("ignore")
            return torch.export.export(model, tuple(args), dict(kwargs), dynamic_shapes=shapes)
    except Exception as error:
        check_runs(model, args, kwargs)
        raise GraphError(f"torch.export cannot export {type(model).__name__}: {why_not_exported(error)}") from error


def _positional(model: nn.Module, shapes: Sequence[Any]) -> dict[str, Any]:
    """Shapes of positional arguments by parameter name; those of *args together."""
    found: dict[str, Any] = {}
    for index, parameter in enumerate(inspect.signature(model.forward).parameters.values()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            found[parameter.name] = tuple(shapes[index:])
            break
        if index < len(shapes):
            found[parameter.name] = shapes[index]
    return found


def _example(x: Any) -> Any:
    """A tensor as torch.export takes it: it specialises sizes 0 and 1, and fails where the batch's stride is no other
    axes' product."""
    if not isinstance(x, (Tensor, np.ndarray)):
        return x
    x = as_tensor(x, "an example input")
    return torch.cat([x, x]) if x.ndim > 0 and x.shape[0] == 1 else x.contiguous()


def _open_batch(x: Any) -> Any:
    return {0: Dim.AUTO} if isinstance(x, Tensor) and x.ndim > 0 else None


def check_exportable(model: nn.Module) -> None:
    """Check that a model can be exported on any inputs.

    Raises:
        GraphError: it is no nn.Module in eval mode whose parameters are float32, finite and on the CPU.
    """
    if not isinstance(model, nn.Module):
        raise GraphError(f"expected an nn.Module, ExportedProgram or Graph, got {type(model).__name__}")
    if model.training:
        raise GraphError("the model is in training mode; call model.eval() first")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise GraphError(f"{name!r} is {tensor.dtype}; hago imports float32 models: call model.float()")
        if tensor.device.type != "cpu":
            raise GraphError(f"{name!r} is on {tensor.device}; hago imports models on the CPU: call model.cpu()")
    for name, tensor in model.named_parameters():
        check_finite(name, tensor)
