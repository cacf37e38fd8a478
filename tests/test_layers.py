"""The layers of docs/design.md, read off the imports; and what importing hago must not do."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hago

ROOT = Path(hago.__file__).parent

#: The packages and modules of hago from the ground up. A package imports only what stands above its own line here.
LAYERS: tuple[str, ...] = (
    "errors",
    "version",
    "shipped_hardware",
    "caching",
    "garbage_collection",
    "serialization",
    "arithmetic",
    "emulation",
    "ops",
    "data",
    "graph",
    "hardware",
    "calibration",
    "correction",
    "plan",
    "importing",
    "simulation",
    "runtime",
    "cost",
    "export",
    "study",
    "searchers",
    "search",
    "qat",
    "callbacks",
    "analysis",
    "report",
    "api",
    "demo",
    "cli",
    "__main__",
)
#: Who may import what emulates other systems: never the arithmetic that hago itself computes with.
EMULATING = ("emulation", "ops.forms", "calibration", "plan.placement", "plan.dorefa_weights", "export", "qat", "cli")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module, or name of a module, that is imported anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_package(name: str) -> bool:
    return name in MODULES and MODULES[name].name == "__init__.py"


@functools.cache
def offered(package: str) -> frozenset[str]:
    """The names in the `__all__` of a package."""
    for node in tree_of(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


@functools.cache
def sources(package: str) -> dict[str, str]:
    """Where the names come from that a package imports into its `__init__.py`."""
    imported = [n for n in tree_of(package).body if isinstance(n, ast.ImportFrom)]
    return {a.asname or a.name: f"{n.module}.{a.name}" for n in imported for a in n.names}


def module_of(imported: str) -> str:
    """The module that an imported name is defined in, looked up through the packages that offer it."""
    while imported not in MODULES and "." in imported:
        module, _, name = imported.rpartition(".")
        passed_on = sources(module).get(name) if module != "hago" and is_package(module) else None
        imported = module if passed_on is None else passed_on
    return imported


def own_imports(name: str) -> set[str]:
    """The modules of hago that a module imports from, not the packages that offer what it imports."""
    return {m for i in imports(tree_of(name)) if (m := module_of(i)).startswith("hago")} - {name}


def passed_by(name: str, imported: str) -> bool:
    """Whether a module imports from another package something that the package does not offer."""
    module, rest = ".".join(imported.split(".")[:2]), imported.split(".")[2:]
    if not module.startswith("hago.") or not is_package(module) or f"{name}.".startswith(f"{module}."):
        return False
    for part in rest:
        if part.startswith("_") or (is_package(module) and part not in offered(module)):
            return True
        module = f"{module}.{part}"
    return False


def part_of(name: str) -> str:
    """The package, or the module next to the packages, that a module belongs to."""
    return name.split(".")[1]


def test_every_module_has_a_layer() -> None:
    assert {part_of(name) for name in MODULES if name != "hago"} == set(LAYERS)


def test_the_design_lists_the_layers_in_their_order() -> None:
    page = (ROOT.parent / "docs" / "design.md").read_text("utf-8")
    table = page[page.index("## Packages") : page.index("The same test holds these rules")]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.M)) == LAYERS


def test_imports_point_down() -> None:
    for name in MODULES:
        for imported in own_imports(name) - {"hago"}:
            if name == "hago":
                continue
            part, other = part_of(name), part_of(imported)
            assert LAYERS.index(other) <= LAYERS.index(part), f"{name} imports {imported}, which stands above it"


def test_only_the_command_line_imports_the_package_itself() -> None:
    assert all(name.startswith(("hago.cli", "hago.__main__")) for name in MODULES if "hago" in own_imports(name))


def test_nothing_imports_itself_in_a_circle() -> None:
    # a package's __init__ imports the modules that it is made of
    graph = {n: {i for i in own_imports(n) if i != "hago"} for n in MODULES if n != "hago"}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


def test_searchers_and_the_search_loop_know_no_plan_and_no_simulator() -> None:
    for name in MODULES:
        if part_of(f"{name}.") in ("study", "searchers"):
            known = {".".join(i.split(".")[1:]) for i in own_imports(name)}
            assert not {k for k in known if k.split(".")[0] in ("simulation", "runtime", "cost", "search")}, name
            assert {k for k in known if k.split(".")[0] == "plan"} <= {"plan.space", "plan.strategy"}, name


def test_the_two_readers_of_a_plan_share_only_arithmetic() -> None:
    for name in MODULES:
        if name.startswith("hago.simulation."):
            assert not {i for i in own_imports(name) if i.startswith("hago.runtime")}, name
    assert "hago.simulation.simulator" not in own_imports("hago.runtime.reference")


def test_other_systems_are_emulated_apart() -> None:
    for name in MODULES:
        if any(i.startswith("hago.emulation") for i in own_imports(name)):
            assert name.removeprefix("hago.").startswith(EMULATING), f"{name} computes with another system's arithmetic"
        if name.startswith("hago.emulation"):
            assert all(part_of(i) in ("errors", "arithmetic", "emulation") for i in own_imports(name)), name


def test_every_package_says_what_it_is() -> None:
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            assert len((ast.get_docstring(tree_of(name)) or "").split()) >= 5, name


# ---------------------------------------------------------------- what packages offer
def test_packages_are_imported_by_what_they_offer() -> None:
    for name in MODULES:
        for imported in imports(tree_of(name)):
            assert not passed_by(name, imported), f"{name} imports {imported}, which its package does not offer"


@pytest.mark.parametrize(
    ("imported", "wrong"),
    [
        ("hago.plan.Resolver", False),
        ("hago.plan.resolve.Resolver", True),
        ("hago.plan.feasibility.nearest_feasible", False),
        ("hago.plan.feasibility._FeasibleSearch", True),
        ("hago.plan.NodeBuilder", True),
        ("hago.ops._rule.Site", True),
        ("hago.runtime.native.Executor", False),
        ("hago.runtime.native.executor.Executor", True),
        ("hago.search.scoring.GoalScorer", False),  # its own package
        ("hago.errors.HagoError", False),
        ("torch.nn.functional", False),
    ],
)
def test_passing_by_a_package_is_seen(imported: str, wrong: bool) -> None:
    assert passed_by("hago.search.session", imported) == wrong


def test_modules_import_the_modules_of_their_own_package() -> None:
    # what a package offers is there only after all of its modules have been imported
    for name in MODULES:
        packages = {name.rpartition(".")[0], f"hago.{part_of(f'{name}.')}"} - {"hago", name}
        for imported in imports(tree_of(name)):
            owner = imported.rpartition(".")[0]
            assert owner not in packages or imported in MODULES, f"{name} imports {imported} from its own package"


def test_what_packages_offer_is_there() -> None:
    for name in filter(is_package, MODULES):
        package = importlib.import_module(name)
        assert offered(name) or name == "hago.ops.forms", name
        for offer in offered(name):
            if f"{name}.{offer}" in MODULES:
                importlib.import_module(f"{name}.{offer}")  # some are imported only when they are asked for
                assert inspect.ismodule(getattr(package, offer)), f"{name} hides its module {offer}"
            assert hasattr(package, offer), f"{name} has no {offer}"


# ---------------------------------------------------------------- who may import what of others
def test_only_the_frontend_reads_exported_programs() -> None:
    for name in MODULES:
        for imported in imports(tree_of(name)):
            if imported.startswith(("torch.export", "torch.fx", "torch._export", "torch._dynamo")):
                a_type = imported == "torch.export.ExportedProgram"  # what users may pass instead of a module
                assert name.startswith("hago.graph.frontend") or a_type, f"{name} imports {imported}"


def test_nothing_is_unpickled() -> None:
    for name in MODULES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
                "pickle",
                "marshal",
                "shelve",
                "dill",
                "joblib",
            ):
                assert node.attr.endswith("Error"), f"{name}:{node.lineno}"  # to say what is wrong
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("pickle", "marshal", "shelve", "dill", "joblib"), f"{name}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "load") and node.keywords:
                chosen = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert ast.unparse(node.func) != "torch.load" or chosen.get("weights_only") == "True", name
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "eval", "exec", "compile"):
                assert any(k.arg == "weights_only" for k in node.keywords), f"{name}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "np.load":
                assert any(k.arg == "allow_pickle" and ast.unparse(k.value) == "False" for k in node.keywords), name


def test_only_the_command_line_prints() -> None:
    for name in MODULES:
        prints = [n for n in ast.walk(tree_of(name)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "print"]
        assert name == "hago.cli" or not prints


def test_how_a_module_reads() -> None:
    """A first line that says its job, no bare except, no assignment to another module's names."""
    for name in MODULES:
        assert (ast.get_docstring(tree_of(name)) or "").strip(), name
        for node in ast.walk(tree_of(name)):
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{name}:{node.lineno}"
            assert not isinstance(node, ast.Global), f"{name}:{node.lineno}"


# ---------------------------------------------------------------- what an import does
_PROBE = """
import io, json, logging, random, sys, warnings
import numpy, torch

def state():
    return {
        "dtype": str(torch.get_default_dtype()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch random": torch.get_rng_state().tolist(),
        "random": repr(random.getstate()),
        "numpy random": repr(numpy.random.get_state()),
        "mkldnn": torch.backends.mkldnn.enabled,
        "warnings": len(warnings.filters),
        "handlers": [repr(h) for h in logging.getLogger().handlers],
        "excepthook": sys.excepthook is sys.__excepthook__,
    }

import jsonschema, optuna, scipy.stats, tqdm, torch.export, torch.fx  # not ours to answer for
before = state()
import hago, importlib, pkgutil
for module in pkgutil.walk_packages(hago.__path__, "hago."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
after = state()
sys.stderr.write(json.dumps({k: [before[k], after[k]] for k in before if before[k] != after[k]}))
"""


def test_importing_changes_nothing_and_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""
    assert json.loads(done.stderr) == {}


def test_the_public_names_are_few_and_there() -> None:
    assert len(hago.__all__) <= 30
    assert all(hasattr(hago, name) for name in hago.__all__)
    assert list(hago.__all__) == sorted(hago.__all__)
