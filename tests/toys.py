"""Small searches whose answers are known: spaces, evaluations, and the logs they leave."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hago
from hago.arithmetic.types import Edge
from hago.plan.space import Bits, Group, Space
from hago.plan.strategy import HardwareId
from hago.searchers.registry import make_searcher
from hago.study.log import Header, make_header
from hago.study.loop import StudyResult, run_study
from hago.study.score import Score
from hago.study.searcher import Searcher

SCHEMAS: Path = Path(next(iter(hago.__path__))) / "serialization" / "schemas"


def _fields_of_time(name: str) -> tuple[str, ...]:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    return tuple(schema["properties"]["time"]["properties"])


#: What stands under `time` in a header and in a trial.
_TIME: Mapping[str, tuple[str, ...]] = {name: _fields_of_time(name) for name in ("log_header", "trial")}
#: Options under which each searcher stays small.
SMALL: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "random": {"trials": 12, "batch": 3},
    "greedy": {},
    "annealing": {"cooling": 0.7},
    "exhaustive": {"batch": 4},
    "sensitivity": {"moves": 12, "batch": 3},
    "gradient": {"moves": 12},
    "limited": {"moves": 12},
    "pareto": {"points": 8, "batch": 3},
    "tpe": {"trials": 10, "startup": 4, "warm": 3, "batch": 2},
    "nsga2": {"trials": 10, "startup": 4, "warm": 3},
    "gp": {"trials": 6, "warm": 2},
    "rfc_greedy": {},
}


def make_space(choices: Mapping[str, Sequence[int]]) -> Space:
    """A space with a group for each edge."""
    edges = {key: Edge.parse(key) for key in choices}
    return Space({k: Group(k, f"before_{e.dst}", (e,), tuple(choices[k])) for k, e in edges.items()})


#: 4 x 3 x 2 x 2 = 48 points; choices with gaps, too.
TOY = make_space({"conv:0": (8, 7, 6, 5), "conv:1": (8, 6, 4), "relu:0": (8, 4), "add:1": (16, 12)})
TARGET: Bits = {"conv:0": 6, "conv:1": 6, "add:1": 12}


def separable(bits: Bits) -> Score:
    """Highest where every group has its target; `relu:0` does not matter to the value."""
    value = -sum(abs(bits[k] - want) * (1 + 0.3 * i) for i, (k, want) in enumerate(TARGET.items()))
    return Score(value, {"sqnr": value / 3, "sim_acc": 0.1}, total_bits=sum(bits.values()), unproved=1)


def without_relu(bits: Bits) -> str:
    """A plan key that knows that `relu:0` is inert."""
    return ",".join(f"{k}={b}" for k, b in sorted(bits.items()) if k != "relu:0")


@dataclass
class Counting:
    """An evaluation that keeps what it was asked."""

    evaluate: Callable[[Bits], Score]
    calls: list[dict[str, int]] = field(default_factory=list)

    def __call__(self, bits: Bits) -> Score:
        self.calls.append(dict(bits))
        return self.evaluate(bits)


def header_of(searcher: Searcher, space: Space = TOY, seed: int = 0, **changes: Any) -> Header:
    given: dict[str, Any] = {
        "seed": seed,
        "model_hash": "m" * 8,
        "hardware": HardwareId("toy", "h" * 8),
        "data_hash": "d" * 8,
        "estimator": "avg_range",
        "objective": {"name": "sqnr"},
        "keep_float": ["fc"],
        "fix_bits": {"conv:0": 8},
        "threads": 1,
    }
    return make_header(space, searcher, **{**given, **changes})


def run(
    name: str,
    log: Path | None = None,
    evaluate: Callable[[Bits], Score] = separable,
    *,
    space: Space = TOY,
    start: Bits | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> StudyResult:
    """One search of a fresh searcher."""
    searcher = make_searcher(name, space, start, seed, options=SMALL[name] if options is None else options)
    header = None if log is None else header_of(searcher, space, seed)
    return run_study(space, searcher, evaluate, log=log, header=header, **arguments)


def timeless(log: bytes) -> list[str]:
    """The lines of a log, less the field that holds times."""
    assert log.endswith(b"\n")
    lines = []
    for line in log.splitlines():
        record = json.loads(line)
        assert set(record.pop("time")) <= set(_TIME["trial" if "index" in record else "log_header"])
        lines.append(json.dumps(record, sort_keys=True))
    return lines


def chain(length: int, register_bits: int) -> tuple[Space, Callable[[Bits], Score]]:
    """`length` convolutions of 8 by 8 bits on a register of `register_bits`, each with 512 products.

    The value grows with bits. A node overflows where the peak, 2 ** (bits - 1) for both operands
    times 512 over a head room of 16, passes the register.
    """
    keys = [f"conv{i}:{slot}" for i in range(length) for slot in (0, 1)]
    space = make_space(dict.fromkeys(keys, (8, 7, 6, 5, 4, 3, 2)))

    def evaluate(bits: Bits) -> Score:
        peaks = {f"conv{i}": bits[f"conv{i}:0"] + bits[f"conv{i}:1"] - 2 + 5 for i in range(length)}
        excess = {n: p - (register_bits - 1) for n, p in peaks.items() if p > register_bits - 1}
        value = sum(1 - math.exp2(-b) for b in bits.values())
        return Score(
            value,
            overflows={n: 10**e for n, e in excess.items()},
            excess_bits=excess,
            total_bits=sum(bits.values()),
        )

    return space, evaluate


def resumed(path: Path) -> bytes:
    """What the log at `path` becomes when the search that left the fixture `whole` goes on."""
    run("exhaustive", path, plan_key=without_relu, budget=10, notice=lambda _: None)
    return path.read_bytes()
