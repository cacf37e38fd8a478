"""What every test shares: one thread, helpers whose asserts are explained, and golden files."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import products
import pytest
import torch
from hypothesis import settings

pytest.register_assert_rewrite("ops.laws", "plans")
# the scripts, of which tests run small parts, and the networks and chips made up that both need
SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path += [str(SCRIPTS), str(SCRIPTS / "made_up")]

# the processes that tests start do not wait for each other's threads
os.environ.setdefault("OMP_NUM_THREADS", "1")

# the same cases in every run, more of them with --whole; `--hypothesis-profile=explore` draws new ones
settings.register_profile("hago", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("whole", deadline=None, derandomize=True, max_examples=200)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew; read the diff")
    parser.addoption("--whole", action="store_true", help="every case of the laws over products, and more drawn ones")
    parser.addoption(
        "--instruction-set", help="run on kernels for it, emulated where the processor lacks it", default=""
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "some_cases(most): of its cases a run takes at most so many; all with --whole")
    products.asked["whole"] = config.getoption("--whole")
    products.asked["named"] = _names_tests(config)
    settings.load_profile("whole" if products.whole() else "hago")
    if config.getoption("--instruction-set"):
        _use_kernels_for(config.getoption("--instruction-set"))


def _names_tests(config: pytest.Config) -> bool:
    """Whether tests are asked for by name."""
    return bool(config.option.keyword) or any("::" in argument for argument in config.args)


def _use_kernels_for(instruction_set: str) -> None:
    """Make the kernels for an instruction set those that this process uses, before tests ask which are exact."""
    from runtime.instruction_sets import library_for

    from hago.errors import HagoError
    from hago.runtime.native import library as native

    try:
        of_process, chosen = native.library, library_for(instruction_set, asked=True)
    except (pytest.skip.Exception, HagoError) as error:
        raise pytest.UsageError(f"--instruction-set {instruction_set}: {error}") from None

    def library(name: str | None = None) -> native.Library:
        return of_process(name) if name else chosen

    library.__wrapped__ = of_process.__wrapped__  # type: ignore[attr-defined]
    native.library = library  # type: ignore[assignment]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of tests with the mark `some_cases`, unless tests are named: those that stay are drawn by a hash
    of their names, so they are the same in every run, and every process."""
    if products.whole() or _names_tests(config):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some_cases") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set[pytest.Item]()
    for of_test in cases.values():
        mark = of_test[0].get_closest_marker("some_cases")
        assert mark is not None
        drawn = sorted(of_test, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
        left_out.update(drawn[mark.args[0] :])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors are faster on one thread, and float sums then never depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the file of that name in tests/golden."""

    def check(name: str, text: str) -> None:
        path, text = GOLDEN / name, text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text

    return check
