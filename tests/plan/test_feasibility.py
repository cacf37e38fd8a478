"""Feasible points on chips that refuse some combinations of bits, compared with all points of small spaces."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Final

import fuzz_exactness
import pytest
from refusing_chips import DATA, behind, either, layers, signs

from hago import quantize
from hago.cost.report import cost_range
from hago.errors import InfeasibleBits
from hago.hardware.hardware import Hardware
from hago.plan.feasibility import (
    ChoicePoints,
    choices_by_dtype,
    may_have_infeasible_points,
    nearest_feasible,
    plan_or_refusal,
    point_at_choice,
    prune_infeasible_choices,
    widest_feasible,
)
from hago.plan.resolve import Resolver
from hago.plan.space import Bits, Space, build_space
from hago.plan.topology import analyze
from hago.search.preparation import QuantizationOptions, prepare

CHIPS: Final = {chip.name: chip for chip in (either(), signs(), behind())}
#: Chips, and bits that are fixed, so that a chip refuses combinations at nodes that depend on them.
FIXED: Final = [
    ("either", {}),
    ("either", {"conv0.weight": 7}),
    ("either", {"conv1:out": 12}),
    ("signs", {}),
    ("signs", {"conv0:out": 4}),
    ("signs", {"conv2:out": 8}),
    ("behind", {}),
    ("behind", {"conv1:out": 8}),
]
cases = pytest.mark.parametrize(("name", "fixed"), FIXED, ids=str)


def resolver_of(chip: Hardware, fixed: Mapping[str, int], unpruned: bool = True) -> Resolver:
    """The resolver of three layers, for the whole space or for the pruned one."""
    made = prepare(layers(3), chip, DATA, QuantizationOptions(estimator="max_range", fix_bits=fixed))
    if not unpruned:
        return made.resolver
    return made.resolver.with_space(build_space(made.graph, chip, made.topology, fixed))


def refused(resolver: Resolver, bits: Bits) -> bool:
    return isinstance(plan_or_refusal(resolver, bits), InfeasibleBits)


def every_point(resolver: Resolver) -> list[dict[str, int]]:
    """One point for each combination of dtypes."""
    groups = resolver.space.groups
    points = itertools.product(*([c[0] for c in choices_by_dtype(resolver, g)] for g in groups.values()))
    return [dict(zip(groups, choices, strict=True)) for choices in points]


@cases
def test_pruned_choices_are_those_that_no_feasible_point_has(name: str, fixed: Mapping[str, int]) -> None:
    resolver = resolver_of(CHIPS[name], fixed)
    fits = [point for point in every_point(resolver) if not refused(resolver, point)]
    pruned = prune_infeasible_choices(resolver)
    for key, group in resolver.space.groups.items():
        kept = {b for c in choices_by_dtype(resolver, group) if any(point[key] == c[0] for point in fits) for b in c}
        assert set(pruned.groups[key].choices) == kept, key


@cases
def test_no_feasible_point_is_wider_than_the_widest(name: str, fixed: Mapping[str, int]) -> None:
    resolver = resolver_of(CHIPS[name], fixed)
    most = widest_feasible(resolver)
    assert not refused(resolver, most.bits)
    above = (p for p in every_point(resolver) if p != most.bits and all(p[k] >= b for k, b in most.bits.items()))
    assert all(refused(resolver, point) for point in above)


@cases
def test_fixed_groups_keep_their_bits(name: str, fixed: Mapping[str, int]) -> None:
    """A feasible point is found if and only if there is one."""
    resolver = resolver_of(CHIPS[name], fixed)
    every, rng = every_point(resolver), random.Random(0)
    fits = [point for point in every if not refused(resolver, point)]
    for point in rng.sample(every, min(40, len(every))):
        fixed_groups = rng.sample(list(point), 2)
        found = nearest_feasible(resolver, point, fixed_groups)
        is_feasible = any(all(other[k] == point[k] for k in fixed_groups) for other in fits)
        assert (found is not None) == is_feasible
        if found is not None:
            assert found.plan.key == resolver(found.bits).key and all(found.bits[k] == point[k] for k in fixed_groups)


@cases
def test_choice_points_cover_every_feasible_choice(name: str, fixed: Mapping[str, int]) -> None:
    resolver = resolver_of(CHIPS[name], fixed, unpruned=False)
    choice_points = ChoicePoints(resolver)
    for key, group in resolver.space.groups.items():
        for index, bits in enumerate(group.choices):
            (point,) = (s for s in choice_points.of(index) if key in s.keys)
            assert point.bits[key] == bits and not refused(resolver, point.bits)
            assert choice_points.plan(index, key) is point.plan
            assert point.plan.key == resolver(point.bits).key


def test_one_choice_point_is_enough_if_the_choices_are_feasible_together() -> None:
    resolver = prepare(layers(2), "x86_vnni", DATA, QuantizationOptions(estimator="max_range")).resolver
    choice_points = ChoicePoints(resolver)
    for index in range(choice_points.count):
        assert [dict(point.bits) for point in choice_points.of(index)] == [point_at_choice(resolver.space, index)]
    assert prune_infeasible_choices(resolver) is resolver.space


def test_an_infeasible_space_is_refused_before_a_search() -> None:
    with pytest.raises(InfeasibleBits, match=r"network on signs.*no signature.*'conv1'.*uint8.*fix_bits"):
        prepare(layers(3), signs(), DATA, QuantizationOptions(fix_bits={"conv0:out": 3, "conv2:out": 8}))


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_one_shot_quantization_and_cost_range_use_feasible_points(chip: Hardware) -> None:
    quantizer = quantize(layers(3), chip, DATA)
    assert not refused(resolver_of(chip, {}), quantizer.strategy.bits)
    graph = layers(3)
    topology = analyze(graph, chip)
    found = cost_range(graph, chip, topology, build_space(graph, chip, topology))
    assert found.narrowest["weight_bytes"] < found.widest["weight_bytes"]


# ---------------------------------------------------------------- any chip
def test_no_point_is_infeasible_unless_the_space_may_have_some() -> None:
    """On random networks and hardware; for the three chips of this file, which refuse points, it is true."""
    for chip in CHIPS.values():
        assert may_have_infeasible_points(resolver_of(chip, {}))
    asked = 0
    for seed in range(24):
        rng = random.Random(seed)
        resolver = fuzz_exactness._prepared(seed, rng, fuzz_exactness.Counts(), fuzz_exactness.WIDTHS).resolver
        if not may_have_infeasible_points(resolver):
            asked += 1
            for point in (_random(resolver.space, rng) for _ in range(6)):
                assert not refused(resolver, point)
    assert asked > 12


def _random(space: Space, rng: random.Random) -> dict[str, int]:
    return {k: rng.choice(g.choices) for k, g in space.groups.items()}
