"""The point of least expected loss whose cost stays under a limit, by integer programming.

`EvaluationHistory.program` makes a `Knapsack` of a space and a surrogate once per round of a search, which solves it
for one or more limits. Groups that have few combinations are merged first (`merge_groups`). The program has a binary
variable for every choice of a group, exactly one of each group's being 1; and a variable for every row of a term over
several groups, constrained to agree with the choices of each group (the local polytope of a pairwise model, exact here
since the choices are integers). Bits that a term's table lacks are in no solution.

References:
    The allocation as an integer program: Z. Yao et al., "HAWQ-V3", ICML 2021. HiGHS: Q. Huangfu, J. Hall, Math. Prog.
    Comp. 10, 2018.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hago.plan import FLOAT, Space
from hago.searchers.merged_groups import AccumulatorLimit, merge_groups
from hago.searchers.surrogate import Surrogate, Term

Vector: TypeAlias = NDArray[np.float64]

#: The largest loss is scaled to this, since the solver compares absolute differences of 1e-6.
_SCALE: Final = 1e4
#: Weight of the cost in the objective: of points of equal loss the cheaper one is the solution.
_TIE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Solution:
    """A solution of the program: a point with its expected loss and cost."""

    bits: Mapping[str, int]
    loss: float
    cost: float


class Knapsack:
    """The integer program of one space and surrogate. `solve` may be called for any number of limits.

    The limits of the surrogate on other costs (`Surrogate.constraints`) hold for every solution. If no point keeps
    these together with the surrogate's own limit, going by expected costs, they are ignored, and evaluations decide.

    Args:
        accumulator_limits: further constraints on every solution.
    """

    def __init__(self, space: Space, surrogate: Surrogate, accumulator_limits: Sequence[AccumulatorLimit] = ()) -> None:
        merged = merge_groups({k: g.choices for k, g in space.groups.items()}, surrogate, accumulator_limits)
        self._original, self._merged = surrogate, merged
        surrogate, self._accumulator_limits, self._choices = merged.surrogate, merged.accumulator_limits, merged.choices
        self._surrogate = surrogate
        self._found: dict[tuple[tuple[str, float], ...], list[tuple[float, Solution]]] = defaultdict(list)
        self.index = {(k, b): i for i, (k, b) in enumerate((k, b) for k, bs in self._choices.items() for b in bs)}
        self.size = len(self.index)
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._sides: list[float] = []
        self._at_most: list[tuple[list[tuple[int, float]], float]] = []
        for key, choices in self._choices.items():
            self._add_equality([(self.index[key, b], 1.0) for b in choices], 1.0)
        costs = [self._costs(terms) for terms in (surrogate.terms, *(c.terms for c in surrogate.constraints))]
        self.gated = [self._add_gated_choices(gate, key) for gate, keys in surrogate.gates.items() for key in keys]
        self.cost, *other_costs = map(self._vector, costs)
        self.constraints = list(zip(surrogate.constraints, other_costs, strict=True))
        if self.constraints and self._solve_within(np.zeros(self.size), surrogate.limit, {}) is None:
            self.constraints = []

    def _add_equality(self, entries: Sequence[tuple[int, float]], side: float) -> None:
        """Add the constraint that the sum of coefficient * variable over (variable, coefficient) equals `side`."""
        row = len(self._sides)
        for column, value in entries:
            self._rows.append(row)
            self._columns.append(column)
            self._values.append(value)
        self._sides.append(side)

    def _add_gated_choices(self, gate: str, key: str) -> tuple[str, dict[int, int]]:
        """Add variables, by bits, that are 1 where a group has these bits and its node is integer, so that the loss of
        the choice counts. They are at least the choice less the gate, and minimizing losses makes them equal to it.
        """
        columns = {}
        for bits in self._choices[key]:
            columns[bits] = self.size
            self.size += 1
            entries = [(self.index[key, bits], 1.0), (columns[bits], -1.0)]
            if (gate, FLOAT) in self.index:
                entries.append((self.index[gate, FLOAT], -1.0))
            self._at_most.append((entries, 0.0))
        return key, columns

    def _accumulator_constraint(self, limit: AccumulatorLimit) -> tuple[list[tuple[int, float]], float]:
        """The constraint of an AccumulatorLimit: (variable, coefficient) pairs, and the most that their sum may be."""
        return [(self.index[k, b], float(b)) for k in limit.keys for b in self._choices[k]], float(limit.bits)

    def _costs(self, terms: Sequence[Term]) -> dict[int, float]:
        """The cost of every variable that has one. Adds the variables of terms over several groups, and the constraint
        that choices missing from a term's table are 0."""
        costs: dict[int, float] = {}
        for term in terms:
            if len(term.keys) > 1:
                costs |= self._add_joint_rows(term)
                continue
            for bits in self._choices[term.keys[0]]:
                column = self.index[term.keys[0], bits]
                if (bits,) in term.table:
                    costs[column] = costs.get(column, 0.0) + term.table[(bits,)]
                else:
                    self._add_equality([(column, 1.0)], 0.0)
        return costs

    def _vector(self, costs: Mapping[int, float]) -> Vector:
        vector = np.zeros(self.size)
        vector[list(costs)] = list(costs.values())
        return vector

    def _add_joint_rows(self, term: Term) -> dict[int, float]:
        """Add variables for the rows of a term over several groups, and the constraints that they agree with the
        choices of each group. Returns the costs of these variables."""
        rows = [r for r in term.table if all(b in self._choices[k] for k, b in zip(term.keys, r, strict=True))]
        first = self.size
        self.size += len(rows)
        for slot, key in enumerate(term.keys):
            for bits in self._choices[key]:
                rows_with_bits = [(first + i, 1.0) for i, r in enumerate(rows) if r[slot] == bits]
                self._add_equality([*rows_with_bits, (self.index[key, bits], -1.0)], 0.0)
        return {first + i: term.table[r] for i, r in enumerate(rows)}

    @property
    def range(self) -> tuple[float, float] | None:
        """The least cost of any point, and the cost of the point of least loss; None where the program has no
        solution."""
        cheapest, best = self._solve_within(self.cost, None, {}), self.solve(None)
        return None if cheapest is None or best is None else (self._original.cost(cheapest), best.cost)

    def solve(self, limit: float | None, other_limits: Mapping[str, float] | None = None) -> Solution | None:
        """The point of least expected loss whose expected cost is at most `limit`; None where there is none. Where
        groups are merged, what was found under a higher limit is the answer if it keeps this one, too.

        Args:
            limit: None for no limit.
            other_limits: on other costs, by metric, in place of those of the surrogate.
        """
        if not self._surrogate.merges:  # earlier logs hold what the solver found
            return self._solution(limit, other_limits or {})
        most, found = math.inf if limit is None else limit, self._found[tuple(sorted((other_limits or {}).items()))]
        solution = next((best for higher, best in found if best.cost <= most <= higher), None)
        if solution is None:
            solution = self._solution(limit, other_limits or {})
            if solution is not None:
                found.append((most, solution))
        return solution

    def _solution(self, limit: float | None, other_limits: Mapping[str, float]) -> Solution | None:
        losses = np.zeros(self.size)
        gated = dict(self.gated)
        for (key, bits), column in self.index.items():
            if key in self._surrogate.losses:
                losses[gated[key][bits] if key in gated else column] = self._surrogate.losses[key][bits]
        largest_loss, largest_cost = (
            float(losses.max(initial=0.0)) or 1.0,
            float(np.abs(self.cost).max(initial=0.0)) or 1.0,
        )
        objective = losses / largest_loss * _SCALE + self.cost / largest_cost * _TIE
        point = self._solve_within(objective, limit, other_limits)
        return None if point is None else Solution(point, self._original.loss(point), self._original.cost(point))

    def _solve_within(
        self, objective: Vector, limit: float | None, other_limits: Mapping[str, float]
    ) -> dict[str, int] | None:
        limits = [] if limit is None else [(self.cost, limit - self._surrogate.constant)]
        other_costs = [(costs, other_limits.get(c.metric, c.most) - c.constant) for c, costs in self.constraints]
        return self._solve(objective, [*limits, *other_costs])

    def _solve(self, objective: Vector, limits: Sequence[tuple[Vector, float]]) -> dict[str, int] | None:
        """The point with the least objective at which each (costs, limit) holds; None where there is none."""
        if not all(self._choices.values()):
            return None
        if not self.size:
            return {} if all(limit >= 0.0 for _, limit in limits) else None  # the solver takes no empty program
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix

        shape = (len(self._sides), self.size)
        equal = coo_matrix((self._values, (self._rows, self._columns)), shape=shape)
        constraints = [LinearConstraint(equal, self._sides, self._sides)]
        for costs, limit in limits:
            unit = abs(limit) or 1.0
            constraints.append(LinearConstraint(costs[None, :] / unit, -np.inf, limit / unit))
        at_most = [*map(self._accumulator_constraint, self._accumulator_limits), *self._at_most]
        if at_most:
            rows = [r for r, (entries, _) in enumerate(at_most) for _ in entries]
            columns = [c for entries, _ in at_most for c, _ in entries]
            values = [v for entries, _ in at_most for _, v in entries]
            at_most_matrix = coo_matrix((values, (rows, columns)), shape=(len(at_most), self.size))
            constraints.append(LinearConstraint(at_most_matrix, -np.inf, [side for _, side in at_most]))
        integral = np.zeros(self.size)
        integral[: len(self.index)] = 1
        with quiet_stdout():
            solution = milp(
                objective,
                constraints=constraints,
                integrality=integral,
                bounds=Bounds(0.0, 1.0),
                options={"mip_rel_gap": 1e-6},
            )
        if solution.x is None:
            return None
        chosen = {key: max(bits, key=lambda b: solution.x[self.index[key, b]]) for key, bits in self._choices.items()}
        return self._merged.bits(chosen)


# ---------------------------------------------------------------- standard output
@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """A context manager that drops what is written to the process's standard output; Python's own is flushed before.
    Nothing happens where the process has no standard output.

    HiGHS as scipy ships it writes a debugging line on some integer programs, whatever its log options say, and standard
    output may be a result that another program reads.
    """
    try:
        original = os.dup(1)
    except OSError:
        yield
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    _flush()
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        _flush()
        os.dup2(original, 1)
        os.close(null)
        os.close(original)


def _flush() -> None:
    """Flush the buffers of C's streams."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
