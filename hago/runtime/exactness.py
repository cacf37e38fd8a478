"""The exactness check: compares the simulator with the integer model, on every output, node and edge, and with the
native engine on every output.

`qat.finetuning` checks a trained model with it, `analysis.strategy_report` and scripts/check_exactness.py any Plan.
`hago.arithmetic.equality` defines when values are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hago.arithmetic.equality import count_differing
from hago.arithmetic.types import Edge
from hago.graph import Node
from hago.plan import Plan
from hago.runtime.native.executor import Executor
from hago.runtime.reference import IntegerModel, center
from hago.simulation import Simulator


@dataclass(frozen=True, slots=True)
class Exactness:
    """The result of `compare_plan_exactly`.

    Args:
        compared: the number of compared values.
        differences: the number of differing values by place, without zeros: "node", "node:slot" or "output:i" for the
            integer model; "output:i fused" for the integer model against the simulator that fuses clamps, and
            "output:i native" for the native engine against that simulator.
    """

    compared: int
    differences: Mapping[str, int]

    @property
    def same(self) -> bool:
        return not self.differences


def compare_plan_exactly(plan: Plan, inputs: Sequence[Tensor]) -> Exactness:
    """Run the simulator and both engines of the integer model on one batch, and compare all values.

    The simulator runs twice: it observes values the first time, and fuses clamps, as in a search, the second time. All
    values of the batch are held in memory, so keep the batch small.
    """
    simulated: dict[str, Tensor] = {}
    differences: dict[str, int] = {}
    compared = 0

    def keep(place: str, value: Any) -> None:
        if isinstance(value, Tensor):
            simulated[place] = value.clone()

    def check(place: str, value: Any) -> None:
        nonlocal compared
        if isinstance(value, Tensor):
            other = simulated.pop(place)
            compared += value.numel()
            if count := count_differing(other, value):
                differences[place] = count

    def check_node(node: Node, value: Any) -> None:
        node_plan = plan.nodes.get(node.name)
        check(node.name, value if node_plan is None else center(value, node_plan.out))

    def keep_edge(edge: Edge, value: Any) -> None:
        keep(str(edge), value)

    def check_edge(edge: Edge, value: Any) -> None:
        check(str(edge), value)

    for i, value in enumerate(Simulator(plan).run(inputs, lambda n, v: keep(n.name, v), keep_edge)):
        keep(f"output:{i}", value)
    for i, value in enumerate(Simulator(plan).run(inputs)):
        keep(f"output:{i} fused", value)
        keep(f"output:{i} native", value)
    for i, value in enumerate(IntegerModel(plan).run(inputs, check_node, check_edge)):
        check(f"output:{i}", value)
        check(f"output:{i} fused", value)
    for i, value in enumerate(Executor(plan).run(inputs)):
        check(f"output:{i} native", value)
    assert not simulated, f"the integer model never made {sorted(simulated)}"
    return Exactness(compared, differences)
