"""Which points fit, where not all bits go together: against every point there is."""

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
    may_refuse,
    nearest_feasible,
    plan_or_refusal,
    point_at_choice,
    prune_infeasible_choices,
    widest_feasible,
)
from hago.plan.resolve import Resolver
from hago.plan.space import Bits, Space, build_space
from hago.plan.topology import analyze
from hago.search.prepare import QuantizationOptions, prepare

CHIPS: Final = {chip.name: chip for chip in (either(), signs(), behind())}
#: By chip, bits that are fixed, with what a chip must then do behind them.
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


def resolver_of(chip: Hardware, fixed: Mapping[str, int], whole: bool = True) -> Resolver:
    """Of three layers; of the whole space, or of the choices that some point has."""
    made = prepare(layers(3), chip, DATA, QuantizationOptions(estimator="max_range", fix_bits=fixed))
    if not whole:
        return made.resolver
    return made.resolver.with_space(build_space(made.graph, chip, made.topology, fixed))


def refused(resolver: Resolver, bits: Bits) -> bool:
    return isinstance(plan_or_refusal(resolver, bits), InfeasibleBits)


def every_kind(resolver: Resolver) -> list[dict[str, int]]:
    """A point for all that differ in no dtype."""
    groups = resolver.space.groups
    listed = itertools.product(*([c[0] for c in choices_by_dtype(resolver, g)] for g in groups.values()))
    return [dict(zip(groups, choices, strict=True)) for choices in listed]


@cases
def test_what_is_supported_is_what_some_point_has(name: str, fixed: Mapping[str, int]) -> None:
    resolver = resolver_of(CHIPS[name], fixed)
    fits = [point for point in every_kind(resolver) if not refused(resolver, point)]
    found = prune_infeasible_choices(resolver)
    for key, group in resolver.space.groups.items():
        kept = {b for c in choices_by_dtype(resolver, group) if any(point[key] == c[0] for point in fits) for b in c}
        assert set(found.groups[key].choices) == kept, key


@cases
def test_the_most_bits_that_fit_have_none_above_them(name: str, fixed: Mapping[str, int]) -> None:
    resolver = resolver_of(CHIPS[name], fixed)
    most = widest_feasible(resolver)
    assert not refused(resolver, most.bits)
    above = (p for p in every_kind(resolver) if p != most.bits and all(p[k] >= b for k, b in most.bits.items()))
    assert all(refused(resolver, point) for point in above)


@cases
def test_groups_that_are_held_keep_their_bits(name: str, fixed: Mapping[str, int]) -> None:
    """And nothing is found only where there is nothing."""
    resolver = resolver_of(CHIPS[name], fixed)
    every, rng = every_kind(resolver), random.Random(0)
    fits = [point for point in every if not refused(resolver, point)]
    for point in rng.sample(every, min(40, len(every))):
        held = rng.sample(list(point), 2)
        found = nearest_feasible(resolver, point, held)
        there = any(all(other[k] == point[k] for k in held) for other in fits)
        assert (found is not None) == there
        if found is not None:
            assert found.plan.key == resolver(found.bits).key and all(found.bits[k] == point[k] for k in held)


@cases
def test_every_choice_is_shown(name: str, fixed: Mapping[str, int]) -> None:
    resolver = resolver_of(CHIPS[name], fixed, whole=False)
    levels = ChoicePoints(resolver)
    for key, group in resolver.space.groups.items():
        for rung, bits in enumerate(group.choices):
            (shown,) = (s for s in levels.of(rung) if key in s.keys)
            assert shown.bits[key] == bits and not refused(resolver, shown.bits)
            assert levels.plan(rung, key) is shown.plan
            assert shown.plan.key == resolver(shown.bits).key


def test_one_point_shows_a_level_where_all_goes_together() -> None:
    resolver = prepare(layers(2), "x86_vnni", DATA, QuantizationOptions(estimator="max_range")).resolver
    levels = ChoicePoints(resolver)
    for rung in range(levels.count):
        assert [dict(shown.bits) for shown in levels.of(rung)] == [point_at_choice(resolver.space, rung)]
    assert prune_infeasible_choices(resolver) is resolver.space


def test_bits_that_nothing_fits_are_refused_before_a_search() -> None:
    with pytest.raises(InfeasibleBits, match=r"network on signs.*no signature.*'conv1'.*uint8.*fix_bits"):
        prepare(layers(3), signs(), DATA, QuantizationOptions(fix_bits={"conv0:out": 3, "conv2:out": 8}))


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_one_shot_quantization_and_costs_need_no_luck(chip: Hardware) -> None:
    quantizer = quantize(layers(3), chip, DATA)
    assert not refused(resolver_of(chip, {}), quantizer.strategy.bits)
    graph = layers(3)
    topology = analyze(graph, chip)
    found = cost_range(graph, chip, topology, build_space(graph, chip, topology))
    assert found.narrowest["weight_bytes"] < found.widest["weight_bytes"]


# ---------------------------------------------------------------- any chip
def test_chips_that_may_refuse_nothing_do_not() -> None:
    """On random networks and hardware; and the three chips, which do, are told."""
    for chip in CHIPS.values():
        assert may_refuse(resolver_of(chip, {}))
    asked = 0
    for seed in range(24):
        rng = random.Random(seed)
        resolver = fuzz_exactness._prepared(seed, rng, fuzz_exactness.Counts()).resolver
        if not may_refuse(resolver):
            asked += 1
            for point in (_random(resolver.space, rng) for _ in range(6)):
                assert not refused(resolver, point)
    assert asked > 12


def _random(space: Space, rng: random.Random) -> dict[str, int]:
    return {k: rng.choice(g.choices) for k, g in space.groups.items()}
