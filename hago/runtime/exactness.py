"""The exactness check: compares the simulator with the integer model, on every output, node and edge, and with the
native engine on every output.

`qat.finetuning` checks a trained model with it, `analysis.strategy_report` and scripts/check_exactness.py any Plan.
`hago.arithmetic.equality` defines when values are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hago.arithmetic.equality import count_differing
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


@dataclass(slots=True)
class _Comparison:
    """The comparison of the values of one batch, while `compare_plan_exactly` runs the models.

    Args:
        expected: the values of the simulator that the integer model has not made yet, by place.
    """

    expected: dict[str, Tensor] = field(default_factory=dict)
    compared: int = 0
    differences: dict[str, int] = field(default_factory=dict)

    def expect(self, place: str, value: Any) -> None:
        """Keep a copy of a simulated value."""
        if isinstance(value, Tensor):
            self.expected[place] = value.clone()

    def check(self, place: str, value: Any) -> None:
        """Compare a value with the simulated one of its place."""
        if isinstance(value, Tensor):
            self.compare(place, self.expected.pop(place), value)

    def compare(self, place: str, expected: Any, value: Any) -> None:
        """Compare a value with that of the simulator. Values that are no tensors are not compared."""
        assert isinstance(value, Tensor) == isinstance(expected, Tensor), f"{place}: only one value is a tensor"
        if isinstance(value, Tensor):
            self.compared += value.numel()
            if count := count_differing(expected, value):
                self.differences[place] = count


def compare_plan_exactly(plan: Plan, inputs: Sequence[Tensor]) -> Exactness:
    """Run the simulator and both engines of the integer model on one batch, and compare all values.

    The simulator runs twice: it observes values the first time, and fuses clamps, as in a search, the second time. The
    native engine runs three times: step by step, then recorded, then the recorded program again. All values of the
    batch are held in memory, so keep the batch small.
    """
    comparison = _Comparison()

    def check_node(node: Node, value: Any) -> None:
        node_plan = plan.nodes.get(node.name)
        comparison.check(node.name, value if node_plan is None else center(value, node_plan.out))

    simulated = Simulator(plan).run(
        inputs,
        lambda node, value: comparison.expect(node.name, value),
        lambda edge, value: comparison.expect(str(edge), value),
    )
    fused = Simulator(plan).run(inputs)
    outputs = IntegerModel(plan).run(inputs, check_node, lambda edge, value: comparison.check(str(edge), value))
    assert not comparison.expected, f"the integer model never made {sorted(comparison.expected)}"
    for i, (output, observed, expected) in enumerate(zip(outputs, simulated, fused, strict=True)):
        comparison.compare(f"output:{i}", observed, output)
        comparison.compare(f"output:{i} fused", expected, output)
    executor = Executor(plan)
    for how in ("native", "native, recorded", "native, repeated"):
        for i, (output, expected) in enumerate(zip(executor.run(inputs), fused, strict=True)):
            comparison.compare(f"output:{i} {how}", expected, output)
    return Exactness(comparison.compared, comparison.differences)
