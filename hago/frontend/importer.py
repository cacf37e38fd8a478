"""Importer: reads the calls of one ExportedProgram into a Graph.

Names come from module paths: a module that is one call gives its path, else path and op. Every call
is read once, by the rule of its op; calls that no rule reads become opaque nodes. Whole numbers and
conditions that take part in real arithmetic are converted first, as torch promotes them, so that a
rule computes on real values alone.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Node as FxNode

from hago.errors import GraphError
from hago.frontend.exported import (
    check_finite,
    counts,
    dtype_of,
    first_line,
    first_of,
    identity,
    is_check,
    is_reading,
    module_path,
    named_arguments,
    nesting,
    open_axes_of,
    reads_as_it_is,
    shape_of,
)
from hago.graph import CONST, INPUT, Graph, Node
from hago.ops import OPS, Ops, _opaque, parsers
from hago.ops._rule import Call, OpRule, Parsed, Ref
from hago.ops._rules import has_ref

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
}

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
        converts: whether operands are converted to real numbers where torch promotes them, and left out of a
            concatenation where they are empty. The first version of hago did neither.

    Attributes:
        converted: whether any was.
    """

    def __init__(self, program: ExportedProgram, ops: Ops = OPS, *, converts: bool = True) -> None:
        self.ops = ops
        self.converts, self.converted = converts, False
        self.parsers = parsers(ops)
        known = self.parsers.keys() | _IDENTITIES
        self.program = program if reads_as_it_is(program, known) else _traced_again(program)
        self.nodes: list[Node] = []
        self.consts: dict[str, Tensor] = {}
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
                raise GraphError(f"the model branches or loops on values ({fx.target}); hago imports no control flow")
            elif fx.op != "placeholder":
                raise GraphError(f"{fx.name} ({fx.op} {fx.target}) cannot be imported; only ATen calls can")
        kept = _reachable(self.nodes, outputs, inputs)
        spec = self.program.call_spec
        return Graph(
            tuple(n for n in self.nodes if n.name in kept),
            tuple(inputs),
            outputs,
            {k: v for k, v in self.consts.items() if k in kept},
            nesting(spec.in_spec, "takes"),
            nesting(spec.out_spec, "returns"),
        )

    # ------------------------------------------------------------ inputs, constants, outputs
    def _placeholders(self) -> list[str]:
        tensors = {**self.program.state_dict, **self.program.constants}
        inputs: list[str] = []
        shared: dict[tuple[Any, ...], str] = {}
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
            same = shared.setdefault(identity(tensor), spec.target)
            self.values[fx] = Ref(same) if same != spec.target else self._const(spec.target, tensor)
        return inputs

    def _input(self, fx: FxNode) -> Ref:
        value = fx.meta["val"]
        if not isinstance(value, Tensor):
            raise GraphError(f"input {fx.name!r} is a {type(value).__name__}; hago takes tensors and constants")
        attrs = {"dtype": str(value.dtype).removeprefix("torch.")}
        return self._add(self._unique(fx.name), INPUT, (), attrs, value)

    def _const(self, name: str, tensor: Tensor) -> Ref:
        name = self._unique(name)
        self.consts[name] = tensor
        return self._add(name, CONST, (), {}, tensor)

    def _outputs(self, fx: FxNode) -> tuple[str, ...]:
        found = []
        for value, spec in zip(fx.args[0], self.program.graph_signature.output_specs, strict=True):  # type: ignore[arg-type]
            if spec.kind != OutputKind.USER_OUTPUT:
                raise GraphError(f"the model writes to {spec.target!r} when run; call model.eval() and export again")
            made = self.values.get(value) if isinstance(value, FxNode) else value
            if not isinstance(made, Ref):
                raise GraphError(f"the model returns {value!r}, which is not a tensor")
            found.append(made.name)
        return tuple(found)

    # ------------------------------------------------------------ calls
    def _call(self, fx: FxNode) -> Any:
        target = _opaque.target_name(fx.target) if not is_check(fx) else ""
        if not target:
            return None
        if target in _IDENTITIES:
            return self._value(fx.args[0])
        whole: Any = fx.args[0] if fx.args else None
        if target == "operator.getitem" and whole in self.parts:
            op, parts = self.parts[whole]
            return self._fold_constant(self._node(fx, op, parts[fx.args[1]]))
        rule = self.parsers.get(target)
        if rule is not None and counts(fx) and rule.name not in _OF_ANY_DTYPE:
            rule = None
        if isinstance(fx.meta.get("val"), (tuple, list)):
            read = self._parse_parts(fx, target, rule)
            if rule is not None and read is not None:
                self.parts[fx] = (rule.name, read)
                return None
            return self._opaque(fx, target)
        parsed = rule.parse(self._read(fx, target)) if rule else None
        made = self._opaque(fx, target) if rule is None or parsed is None else self._node(fx, rule.name, parsed)
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
        return Call(target, read, self.shapes, shape_of(result), open_axes=self.open_axes)

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
            return self._const(f"{name}.{slot}", self.consts[operand.name].to(result))
        made = self._unique(f"{name}.{slot}")
        self.shapes[made], self.open_axes[made] = self.shapes[operand.name], self.open_axes[operand.name]
        self.dtypes[made] = result
        attrs = {"dtype": str(result).removeprefix("torch.")}
        self.nodes.append(Node(made, "to", (operand.name,), attrs, self.shapes[made]))
        return Ref(made)

    def _opaque(self, fx: FxNode, target: str) -> Ref:
        if target in _FILLED_LIKE and not has_ref(sizes := self._value(fx.args[1])):
            number: Any = fx.args[2] if _FILLED_LIKE[target] is None else _FILLED_LIKE[target]
            name = self._name(fx, target.split(".")[1])
            return self._const(name, torch.full(sizes, number, dtype=fx.meta["val"].dtype))
        inputs: list[str] = []
        try:
            args = [_opaque.pack(self._value(a), inputs) for a in fx.args]
            kwargs = {k: _opaque.pack(self._value(v), inputs) for k, v in fx.kwargs.items()}
        except GraphError as error:
            raise GraphError(f"{target} at {module_path(fx) or 'the top of the model'}: {error}") from None
        attrs = {"target": target, "args": args, "kwargs": kwargs}
        name = self._name(fx, target.split(".")[1])
        return self._add(name, _opaque.NAME, tuple(inputs), attrs, fx.meta.get("val"))

    def _fold_constant(self, made: Ref) -> Ref:
        """A node that reads constants only, or fills a tensor of a known size, is computed now and becomes one."""
        node = self.nodes[-1]
        known = bool(node.inputs) or node.attrs.get("target") in _FILLED
        if node.name != made.name or not known or any(s not in self.consts for s in node.inputs) or node.shape is None:
            return made
        tensors = [self.consts[s] for s in node.inputs]
        rule = self.ops.get(node.op)
        value = (rule.compute if rule else _opaque.compute)(node.attrs, *tensors)
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
            if fx.op == "call_function" and not is_check(fx) and not is_reading(fx):
                counts[module_path(fx)] = counts.get(module_path(fx), 0) + 1
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
        self.shapes[name], self.open_axes[name] = shape_of(value), open_axes_of(value)
        self.dtypes[name] = dtype_of(value)
        self.nodes.append(Node(name, op, inputs, attrs, self.shapes[name]))
        return Ref(name)


def _traced_again(program: ExportedProgram) -> ExportedProgram:
    """The same without calls that write to what they are given, and with what some calls are short for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            traced: ExportedProgram = program.run_decompositions({})
            return traced
        except Exception as error:
            raise GraphError(f"run_decompositions failed: {first_line(error)}") from error


def _reachable(nodes: Sequence[Node], outputs: Sequence[str], inputs: Sequence[str]) -> set[str]:
    kept = {*outputs, *inputs}
    for node in reversed(nodes):
        if node.name in kept:
            kept |= set(node.inputs)
    return kept
