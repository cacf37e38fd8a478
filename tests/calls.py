"""What the functions of hago refer to, read from the sources: what a call of one can reach.

A function reaches every function, class and constant of hago whose name it says, and where it takes `x.name` from any
value, the methods of that name of every class that is reached (which is rapid type analysis: an object exists only
where some code that runs names its class). A class is also all of its methods that Python calls by itself
(`__init__`, `__post_init__` and the like), a constant all that its value refers to. Names that are made at run time
are not seen, so `getattr` with a name that is no literal is a name of its own, `getattr of x`.

References:
    D. Bacon and P. Sweeney, "Fast static analysis of C++ virtual function calls", OOPSLA 1996.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import hago

ROOT: Final = Path(hago.__file__).parent


@dataclass(slots=True)
class Unit:
    """A function, class or constant of a module.

    Args:
        names: what it refers to, as dotted names: of hago, of other packages, or built in.
        attributes: what it takes from values.
    """

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class _Module:
    """The units of one module."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name, self.units = name, dict[str, Unit]()
        self.imported: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        self.own = {target for node in tree.body for target in _defined(node)}
        for node in tree.body:
            for target in _defined(node):
                self.take(f"{name}.{target}", node)

    def take(self, name: str, node: ast.AST) -> None:
        if not isinstance(node, ast.ClassDef):
            self.units.setdefault(name, Unit())
            self.read(node, self.units[name])
            return
        unit = self.units[name] = Unit()
        for inner in node.body:
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.take(f"{name}.{inner.name}", inner)
                if inner.name.startswith("__") and inner.name.endswith("__"):
                    unit.names.add(f"{name}.{inner.name}")
            else:
                self.read(inner, unit)
        for outer in [*node.bases, *node.decorator_list, *(k.value for k in node.keywords)]:
            self.read(outer, unit)

    def read(self, node: ast.AST, unit: Unit) -> None:
        """Take note of all names in a piece of code, but those of annotations, which are never evaluated."""
        for inner in _evaluated(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                unit.names |= self.meaning(inner.id)
            elif isinstance(inner, ast.Attribute):
                dotted = self.dotted(inner)
                unit.names |= {dotted} if dotted else set()
                unit.attributes |= set() if dotted else {inner.attr}
            elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "getattr":
                literal = inner.args[1] if len(inner.args) > 1 else None
                if isinstance(literal, ast.Constant):
                    unit.attributes.add(str(literal.value))
                else:
                    unit.names.add(f"getattr of {ast.unparse(inner.args[0])}")

    def meaning(self, name: str) -> set[str]:
        if name in self.imported:
            return {self.imported[name]}
        if name in self.own:
            return {f"{self.name}.{name}"}
        return {name} if hasattr(builtins, name) else set()

    def dotted(self, node: ast.AST) -> str:
        """`a.b.c` where `a` is imported or of this module; empty otherwise."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or not (node.id in self.imported or node.id in self.own):
            return ""
        return ".".join([*self.meaning(node.id), *reversed(parts)])


@functools.cache
def _module(name: str, text: str) -> _Module:
    return _Module(name, ast.parse(text))


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST):
                    yield from _evaluated(inner)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
    for inner in ast.iter_child_nodes(node) if isinstance(node, (ast.If, ast.Try, ast.With)) else ():
        if isinstance(inner, ast.stmt):
            yield from _defined(inner)


@dataclass(frozen=True, slots=True)
class Calls:
    """All units of some sources.

    Args:
        units: by dotted name.
        methods: of each class, by its name.
        imported: what names of modules mean that were imported there.
    """

    units: Mapping[str, Unit]
    methods: Mapping[str, Mapping[str, str]]
    imported: Mapping[str, str]

    @staticmethod
    def of(sources: Mapping[str, str]) -> Calls:
        """From the text of modules, by name."""
        units: dict[str, Unit] = {}
        imported: dict[str, str] = {}
        for name, text in sources.items():
            module = _module(name, text)
            units |= module.units
            imported |= {f"{name}.{k}": v for k, v in module.imported.items()}
        # its rules are found by reading their folder
        units["hago.ops.OPS"].names |= {u for u in units if u.startswith("hago.ops.") and u.endswith(".RULE")}
        methods: dict[str, dict[str, str]] = {}
        for name in units:
            owner, _, last = name.rpartition(".")
            if owner in units:
                methods.setdefault(owner, {})[last] = name
        return Calls(units, methods, imported)

    def reached(self, entries: Collection[str], stop: Collection[str] = ()) -> dict[str, str]:
        """Every name that units reach, and what says it first; attributes as `.name`.

        Args:
            stop: units that are not entered.
        """
        found, waiting = dict.fromkeys(entries, ""), list(entries)
        classes, attributes = set[str](), set[str]()

        def take(name: str, by: str) -> None:
            if name not in found:
                found[name] = by
                waiting.append(name)

        while waiting:
            name = waiting.pop()
            if name in stop or name not in self.units:
                continue
            unit = self.units[name]
            for said in sorted(unit.names):
                take(self.unit(said) or said, name)
            for attribute in sorted(unit.attributes - attributes):
                attributes.add(attribute)
                take(f".{attribute}", name)
                for owner in sorted(classes):
                    if attribute in self.methods[owner]:
                        take(self.methods[owner][attribute], name)
            if name in self.methods and name not in classes:
                classes.add(name)
                for method in sorted(self.methods[name].keys() & attributes):
                    take(self.methods[name][method], name)
        return found

    def unit(self, name: str) -> str:
        """The unit that a dotted name means, also where a package imports it from elsewhere; empty for none of hago."""
        rest = name
        while rest and rest not in self.units:
            if rest in self.imported and self.imported[rest] != rest:
                return self.unit(self.imported[rest] + name[len(rest) :])
            rest = rest.rpartition(".")[0]
        return rest


@functools.cache
def sources() -> Mapping[str, str]:
    """The text of every module of hago."""
    return {module_name(p): p.read_text("utf-8") for p in sorted(ROOT.rglob("*.py"))}


@functools.cache
def calls() -> Calls:
    """Of hago as it is."""
    return Calls.of(sources())
