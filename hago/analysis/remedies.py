"""Remedies for the errors that an inspection finds: changes of a strategy that the hardware allows, tried on a few
samples.

`find_remedies` takes the nodes that add most of the error, and tries for each to keep it float and to give its worst
edge other bits, and of the corrections that were not made those that cure the cause of its error; it also tries the
other estimators, and what rules overflow out. Every change is resolved to a Plan and
simulated, so what is reported is legal and its gain is measured. All thresholds that a change does not concern stay
those of the strategy. `rule_out_overflow` finds bits with which accumulators are proved to hold every input.
"""

from __future__ import annotations

import glob
import shlex
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor

from hago.analysis.error_causes import Cause
from hago.arithmetic.schemes import Grid
from hago.calibration import named_estimator
from hago.cost import amount_text, plan_cost
from hago.data import Batches
from hago.errors import HagoError, HagoWarning, as_strings
from hago.graph import takes_any_batch
from hago.hardware import Hardware
from hago.plan import (
    Bits,
    Group,
    Plan,
    Resolver,
    StoredThresholds,
    Strategy,
    ThresholdSource,
    analyze,
    build_space,
    estimated_resolver,
    expand_policies,
)
from hago.plan.feasibility import group_feeding, nearest_feasible
from hago.plan.topology import matches
from hago.search import (
    CORRECTIONS,
    Evaluator,
    MeasuredPoint,
    Prepared,
    QuantizationOptions,
    chosen_estimator,
    correct,
    correct_point,
    effort_of,
    is_one_shot,
    make_strategy,
    named_effort,
    of_seconds,
    plan_of,
    prepare,
    quantize_in_one_shot,
    stored_resolver,
)
from hago.search.objective import named_objective
from hago.serialization.summary import names_text
from hago.serialization.text_table import wrapped, wrapped_words
from hago.study import Score

#: The most samples that changes are tried on, and the most nodes that they are tried for.
TRIED_SAMPLES: Final = 32
TRIED_NODES: Final = 3
#: The smallest gain that is reported, in dB.
LEAST_GAIN: Final = 0.05
#: The pattern of all weights, and the number of groups above which it stands for their names.
ALL_WEIGHTS: Final = "*.weight"
MOST_NAMED: Final = 4
#: By the cause of a node's error, the corrections that cure it.
CURES: Final[Mapping[Cause, tuple[str, ...]]] = {
    "rounding": ("rotation", "splitting", "equalization", "absorption", "thresholds"),
    "constants": ("equalization", "thresholds", "rounding", "bias", "affine"),
    "saturation": ("thresholds",),
}
#: The estimators that are tried.
_TRIED_ESTIMATORS: Final = ("mse", "max_range", "percentile", "power2_range")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A node whose error is to be made smaller.

    Args:
        node, op: its name and operator.
        cause: the main cause of the error that it adds.
        edges: the keys of its edges through which the cause acts, the worst first.
        narrow_channels: whether channels of its weight have few bits, since all have one scale.
    """

    node: str
    op: str
    cause: Cause
    edges: tuple[str, ...]
    narrow_channels: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """Options of `hago.quantize` and of a search that are added to those with which a strategy was made.

    Args:
        keep_float: a pattern of nodes that stay float, or several.
        fix_bits: bits by pattern of edges.
        estimator: the name of an estimator.
        corrections: the names of the corrections that may be made, or "none"; None for those of the effort.
        effort: the name of an effort; None for the default.
    """

    keep_float: str | tuple[str, ...] | None = None
    fix_bits: Mapping[str, int] = field(default_factory=dict)
    estimator: str | None = None
    corrections: tuple[str, ...] | None = None
    effort: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The patterns that the change names."""
        return (*as_strings(self.keep_float, "keep_float"), *self.fix_bits)

    def to_json(self) -> dict[str, Any]:
        """The options as keyword arguments."""
        kept = self.keep_float
        given = {"keep_float": list(kept) if isinstance(kept, tuple) else kept, "fix_bits": dict(self.fix_bits)}
        given |= {"estimator": self.estimator, "corrections": list(self.corrections or ()), "effort": self.effort}
        return {name: value for name, value in given.items() if value}

    def merged(self, other: Change) -> Change:
        """The options of both; where both give bits to a pattern or an estimator, those of the other."""
        kept = (*as_strings(self.keep_float, "keep_float"), *as_strings(other.keep_float, "keep_float"))
        fixed = {**self.fix_bits, **other.fix_bits}
        estimator, corrections = other.estimator or self.estimator, other.corrections or self.corrections
        effort = other.effort or self.effort
        return Change(tuple(dict.fromkeys(kept)) or None, fixed, estimator, corrections, effort)

    @property
    def words(self) -> list[str]:
        """The options as words of the command line."""
        words = [word for name in as_strings(self.keep_float, "keep_float") for word in ("--keep-float", name)]
        for pattern, bits in self.fix_bits.items():
            words += ["--fix-bits", f"{pattern}={bits}"]
        words += [] if self.estimator is None else ["--estimator", self.estimator]
        words += [word for name in self.corrections or () for word in ("--corrections", name)]
        return words + ([] if self.effort is None else ["--effort", self.effort])

    def __str__(self) -> str:
        return shlex.join(self.words)


def given_options(strategy: Strategy, hardware: Hardware) -> Change:
    """The options with which a strategy was made; without an estimator where that is the default or was refined."""
    made_by = strategy.made_by
    names = tuple(str(name) for name in made_by.get("corrections", ()))
    effort = effort_of(strategy)
    return Change(
        tuple(str(pattern) for pattern in made_by.get("keep_float", ())) or None,
        {str(pattern): int(bits) for pattern, bits in made_by.get("fix_bits", {}).items()},
        chosen_estimator(strategy, hardware),
        None if names == effort.corrections else names or ("none",),
        None if effort == named_effort(None) else effort.name,
    )


def with_given_options(change: Change, strategy: Strategy, resolver: Resolver) -> Change:
    """A change and the options with which a strategy was made, without bits of nodes that both keep float together.

    Args:
        resolver: of the strategy.
    """
    graph, hardware, ops = resolver.graph, resolver.hardware, resolver.ops
    merged = given_options(strategy, hardware).merged(change)
    kept = expand_policies(as_strings(merged.keep_float, "keep_float"), graph, hardware, ops)
    groups = build_space(graph, hardware, analyze(graph, hardware, kept, ops), None, ops).groups.values()
    names = [name for group in groups for name in group.names]
    fixed = {p: bits for p, bits in merged.fix_bits.items() if any(matches(name, (p,)) for name in names)}
    return replace(merged, fix_bits=fixed)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that was tried and makes the error at the outputs smaller.

    Args:
        node: the node that it is for; None if it is for all.
        change: the options that make it.
        gain: dB that the SQNR of the outputs gains on the samples.
        bytes: bytes of constants that it costs.
        strategy: the strategy with this change, on which the gain was measured.
    """

    node: str | None
    change: Change
    gain: float
    bytes: int
    strategy: Strategy

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, without the strategy."""
        options = {"options": self.change.to_json(), "command": str(self.change)}
        return {"node": self.node, **options, "gain_db": self.gain, "bytes": self.bytes}

    @property
    def effect(self) -> str:
        """What it costs and gains, in words."""
        size = amount_text("weight_bytes", abs(self.bytes))
        costs = f"costs {size}" if self.bytes > 0 else f"saves {size}" if self.bytes < 0 else "costs no bytes"
        return f"{costs} and {'loses' if self.gain < 0.0 else 'gains'} {abs(self.gain):.1f} dB"

    def __str__(self) -> str:
        return f"{self.change} {self.effect}"


@dataclass(frozen=True, slots=True)
class OverflowRemedy:
    """A change with which the accumulators of some nodes are proved to hold every input.

    Args:
        nodes: their names.
        remedy: the change, with what it costs and gains.
    """

    nodes: tuple[str, ...]
    remedy: Remedy

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {"nodes": list(self.nodes), **self.remedy.to_json()}


@dataclass(frozen=True, slots=True)
class Remedies:
    """The changes that help, made by `find_remedies`; prints a line for each.

    Args:
        samples: number of samples that they were tried on, evenly spread over the data.
        sqnr: dB of the outputs on these samples without a change.
        found: the changes, the largest gain first.
        together: those of which each adds to the gain in one change, with the options of the strategy; None where none
            is found.
        given: whether the strategy was made with options, to which changes are added.
        impossible: by node, what would help and is not possible on the hardware.
        tried: number of changes that were tried.
        overflow: the change that rules overflow out, whatever it gains, with the options of the strategy; None where
            none is possible or needed.
        command: the command that takes the options: `quantize`, or `search` for a strategy that was searched.
        kept_float: by node, dB that keeping it float gains, also where that is less than `LEAST_GAIN`.
        tried_for: the nodes for which a change of their own was tried.
    """

    samples: int
    sqnr: float
    found: tuple[Remedy, ...]
    impossible: Mapping[str, tuple[str, ...]]
    tried: int
    together: Remedy | None = None
    given: bool = False
    overflow: OverflowRemedy | None = None
    command: str = "quantize"
    kept_float: Mapping[str, float] = field(default_factory=dict)
    tried_for: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "samples": self.samples,
            "sqnr": self.sqnr,
            "tried": self.tried,
            "found": [r.to_json() for r in self.found],
            "together": None if self.together is None else self.together.to_json(),
            "impossible": {node: list(words) for node, words in self.impossible.items()},
            "overflow": None if self.overflow is None else self.overflow.to_json(),
            "for": self.command,
            "kept_float": dict(self.kept_float),
            "tried_for": list(self.tried_for),
        }

    def lines(self) -> Iterator[str]:
        """The remedies in words."""
        if not self.found:
            yield f"{self.tried} changes were tried on {self.samples} samples, and none gains {LEAST_GAIN} dB"
        else:
            given = ", added to the options that were given" if self.given else ""
            yield from wrapped(
                f"try with hago {self.command}{given} (measured on {self.samples} samples, on which the outputs have "
                f"{self.sqnr:.1f} dB):",
                " " * 2,
            )
        for remedy in self.found:
            yield from wrapped_words(f"  {remedy.node or 'all nodes'}: {remedy}", " " * 4)
        if self.together is not None and str(self.together.change) != str(self.found[0].change):
            where = f"in one command, which {self.together.effect}: hago {self.command} with {self.together.change}"
            yield from wrapped_words(where, " " * 4)
        if self.overflow is not None:
            where, remedy = names_text(self.overflow.nodes), self.overflow.remedy
            yield from wrapped_words(
                f"to rule overflow out at {where}, try with hago {self.command}: {remedy}", " " * 4
            )
        if self.impossible:
            yield "not possible:"
        for node, words in self.impossible.items():
            yield from wrapped(f"  {node}: {'; '.join(words)}", " " * 4)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def find_remedies(
    plan: Plan, strategy: Strategy, batches: Batches, suspects: Sequence[Suspect], overflowing: Sequence[str] = ()
) -> Remedies:
    """Try changes of a strategy that make the error of some nodes smaller, and one that rules overflow out.

    Args:
        plan: the Plan of the strategy.
        batches: the data, of which at most `TRIED_SAMPLES` samples are used, evenly spread.
        suspects: the nodes, of which the first `TRIED_NODES` are taken.
        overflowing: the nodes whose accumulators left their register; if there are none, overflow is ruled out where it
            is possible.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HagoWarning)
        return _Trials(plan, strategy, batches).run(suspects[:TRIED_NODES], overflowing)


# ---------------------------------------------------------------- overflow
def rule_out_overflow(resolver: Resolver, bits: Bits, nodes: Sequence[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Bits with which the accumulators of nodes are proved to hold every input: those of the widest operand are lowered
    step by step, of the weight first.

    Args:
        bits: of the strategy.

    Returns:
        The nodes for which there is a proof, and the bits of every group that feeds them, unless these are the most
        that the group may have. All of them belong to the proof.
    """
    groups_of = {name: _groups_feeding(resolver, name) for name in nodes}
    left = [name for name in nodes if groups_of[name]]
    while left:
        point, stuck = _lowered_until_proved(resolver, bits, {name: groups_of[name] for name in left})
        if not stuck:
            groups = {g.key: g for name in left for g in groups_of[name]}
            return tuple(left), {k: point[k] for k, g in groups.items() if point[k] < g.choices[0]}
        left = [name for name in left if name not in stuck]
    return (), {}


def _groups_feeding(resolver: Resolver, name: str) -> list[Group]:
    keys = (group_feeding(resolver, edge) for edge in resolver.graph[name].edges)
    return [resolver.space.groups[key] for key in dict.fromkeys(keys) if key is not None]


def _lowered_until_proved(
    resolver: Resolver, bits: Bits, groups_of: Mapping[str, Sequence[Group]]
) -> tuple[dict[str, int], set[str]]:
    """The bits with which all nodes are proved, and no nodes; or bits, and the nodes whose operands cannot be lowered
    far enough."""
    point, unproved = dict(bits), set(groups_of)
    while True:
        steps = {name: _widest(resolver, point, name, groups_of[name]) for name in unproved}
        stuck = {name for name, groups in steps.items() if not groups}
        for group in {g.key: g for groups in steps.values() for g in groups}.values():
            point[group.key] = max(c for c in group.choices if c < point[group.key])
        try:
            plan = resolver(point)
        except HagoError:  # no signature has these bits, or the strategy holds no thresholds for them
            if stuck:
                return point, stuck
            continue
        unproved = {name for name in groups_of if not (name in plan.nodes and plan.nodes[name].proved)}
        if stuck & unproved:
            return point, stuck & unproved
        if not unproved:
            return point, set()


def _widest(resolver: Resolver, bits: Bits, name: str, groups: Sequence[Group]) -> list[Group]:
    """The groups of a node's operands that lose a bit next; empty where none can."""
    lowerable = [g for g in groups if g.choices[-1] < bits[g.key]]
    widest = max((bits[g.key] for g in lowerable), default=0)
    chosen = [g for g in lowerable if bits[g.key] == widest]
    form = resolver.ops[resolver.graph[name].op].integer
    if form is not None and "common" in form.slots:
        return chosen
    return sorted(chosen, key=lambda g: g.source not in resolver.graph.consts)[:1]


def overflow_changes(resolver: Resolver, strategy: Strategy, nodes: Sequence[str]) -> list[tuple[list[str], Change]]:
    """Changes that rule overflow out at nodes, each with the nodes where it does: fewer bits, with a proof, and what
    cannot be proved in float; and all of the nodes in float. Empty where the hardware allows neither.
    """
    hardware, graph = resolver.hardware, resolver.graph
    floats = [n for n in nodes if hardware.float_descs(graph[n].op, integer_fits=True)]
    proved, fewer = rule_out_overflow(resolver, strategy.bits, nodes)
    rest = [n for n in nodes if n not in proved and n in floats]
    changes = []
    if proved:
        kept = tuple(map(glob.escape, rest)) or None
        change = Change(keep_float=kept, fix_bits=_as_patterns(resolver, strategy.bits, proved, fewer))
        changes.append(([n for n in nodes if n in proved or n in rest], change))
    if floats and (len(floats) == len(nodes) or not proved):
        names = tuple(map(glob.escape, floats))
        changes.append((floats, Change(keep_float=names[0] if len(names) == 1 else names)))
    return changes


def _as_patterns(resolver: Resolver, bits: Bits, proved: Sequence[str], fewer: Mapping[str, int]) -> dict[str, int]:
    """The bits of groups by pattern: one for all weights where most of them are lowered, with exceptions by
    name, or the name of a node for all of its operands."""
    groups = resolver.space.groups
    weights = [k for k, g in groups.items() if matches(g.source, (ALL_WEIGHTS,))]
    if len(fewer) > MOST_NAMED and set(fewer) <= set(weights) and 2 * len(fewer) > len(weights):
        common = Counter(fewer.values()).most_common(1)[0][0]
        others = {key: b for key, b in fewer.items() if b != common}
        fits = all(common in groups[k].choices and bits[k] >= common for k in weights)
        try:
            plan = resolver({**bits, **dict.fromkeys(weights, common), **others}) if fits else None
        except HagoError:
            plan = None
        if plan is not None and all(plan.nodes[name].proved for name in proved):
            return {ALL_WEIGHTS: common, **{glob.escape(key): b for key, b in others.items()}}
    of_nodes: dict[str, dict[str, int]] = {}
    for key, b in fewer.items():
        of_nodes.setdefault(key.rpartition(":")[0], {})[key] = b
    patterns: dict[str, int] = {}
    for node, keys in of_nodes.items():
        # a node's name also stands for what reads its value
        named = {key for key, group in groups.items() if node in group.names}
        alike = len(keys) > 1 and named == keys.keys() and len(set(keys.values())) == 1
        patterns |= (
            {glob.escape(node): next(iter(keys.values()))} if alike else {glob.escape(k): b for k, b in keys.items()}
        )
    return patterns


class _KeptThresholds:
    """A ThresholdSource with the thresholds of a strategy where a change leaves them, else estimated ones."""

    def __init__(self, stored: ThresholdSource, estimated: ThresholdSource, kept: Collection[str]) -> None:
        self._stored, self._estimated, self._kept = stored, estimated, kept

    def signed(self, key: str, source: str) -> bool:
        return self._source(key).signed(key, source)

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        return self._source(key)(key, source, grid, channel_axis)

    def _source(self, key: str) -> ThresholdSource:
        return self._stored if key in self._kept else self._estimated


def _helping(remedy: Remedy | None) -> list[Remedy]:
    """The remedy, if it helps."""
    return [] if remedy is None or remedy.gain < LEAST_GAIN else [remedy]


class _Trials:
    """The trials of one inspection; lives for one call of `find_remedies`."""

    def __init__(self, plan: Plan, strategy: Strategy, batches: Batches) -> None:
        self.plan, self.strategy = plan, strategy
        self.stored = stored_resolver(plan.graph, plan.hardware, strategy)
        # programs that fix the size of a batch take no others
        spread = takes_any_batch(plan.graph, plan.ops)
        chosen = batches.thinned(TRIED_SAMPLES) if spread else batches.first(TRIED_SAMPLES)
        samples = [batch.copy() for batch in chosen]
        self.batches = Batches(samples, plan.graph.inputs, like=batches)
        self.evaluator = Evaluator(
            plan.graph, self.batches, named_objective("sqnr"), plan.ops, engine="float", quiet=True
        )
        self.base = self.evaluator.score(plan, strategy.bits)
        # most changes are tried without corrections of layers, and compared with the strategy without them
        self.uncorrected = self.base
        if strategy.corrections.offsets:
            self.uncorrected = self.evaluator.score(self.stored.with_constants(None)(strategy.bits), strategy.bits)
        self.bytes = plan_cost(plan)["weight_bytes"]
        self.keep_float = tuple(str(p) for p in strategy.made_by.get("keep_float", ()))
        self.estimator = _estimator_of(strategy)
        self.prepared = self._prepare(self.keep_float)
        self.tried = 0

    def run(self, suspects: Sequence[Suspect], overflowing: Sequence[str]) -> Remedies:
        found: list[Remedy] = []
        impossible: dict[str, tuple[str, ...]] = {}
        kept: dict[str, float] = {}
        tried_for: list[str] = []
        untried = set(self._missing_corrections())
        for suspect in suspects:
            before = self.tried
            cures = [name for name in CURES.get(suspect.cause, ()) if name in untried]
            untried -= {*cures}
            corrected = [Change(corrections=self._with_correction(name)) for name in cures]
            found += _helping(self._best(suspect.node, corrected))
            if self.plan.hardware.float_descs(suspect.op):
                remedy = self._best(suspect.node, [Change(keep_float=glob.escape(suspect.node))])
                if remedy is not None:
                    kept[suspect.node] = remedy.gain
                found += _helping(remedy)
            changes = list(self._other_bits(suspect))
            found += _helping(self._best(suspect.node, changes))
            if words := tuple(self._impossible(suspect, bool(changes))):
                impossible[suspect.node] = words
            if self.tried > before:
                tried_for.append(suspect.node)
        if suspects:
            others = [Change(estimator=e) for e in _TRIED_ESTIMATORS if e != self.estimator.partition(":")[0]]
            found += _helping(self._best(None, others))
        found.sort(key=lambda remedy: -remedy.gain)
        return Remedies(
            self.batches.samples,
            self.base.results["sqnr"],
            tuple(found),
            impossible,
            together=self._together(found),
            given=given_options(self.strategy, self.plan.hardware) != Change(),
            overflow=self._without_overflow(overflowing),
            tried=self.tried,
            command="search" if "searcher" in self.strategy.made_by else "quantize",
            kept_float=kept,
            tried_for=tuple(tried_for),
        )

    def _together(self, found: Sequence[Remedy]) -> Remedy | None:
        """Several changes in one: of each node the first with which those before it gain more than without."""
        best, nodes = None, set[str | None]()
        for remedy in found:
            if remedy.node in nodes:
                continue
            tried = remedy if best is None else self._try(None, best.change.merged(remedy.change), corrected=True)
            if tried is not None and (best is None or tried.gain >= best.gain + LEAST_GAIN):
                best = tried
                nodes.add(remedy.node)
        return None if best is None else self._with_given_options(best)

    def _with_given_options(self, remedy: Remedy) -> Remedy:
        return replace(remedy, change=with_given_options(remedy.change, self.strategy, self.stored))

    def _without_overflow(self, overflowing: Sequence[str]) -> OverflowRemedy | None:
        """The change that rules overflow out at these nodes, or where it is possible, at the least loss."""
        nodes = list(overflowing) or [n for n, verdict in self.plan.verdicts.items() if verdict == "possible"]
        tried = [
            OverflowRemedy(tuple(where), self._with_given_options(remedy))
            for where, change in (overflow_changes(self.stored, self.strategy, nodes) if nodes else ())
            if (remedy := self._try(None, change)) is not None and self._is_proved(remedy.strategy, where)
        ]
        return max(tried, key=lambda each: (len(each.nodes), each.remedy.gain), default=None)

    def _is_proved(self, strategy: Strategy, nodes: Collection[str]) -> bool:
        """Whether no accumulator of some nodes can overflow with a strategy."""
        plan = plan_of(self.plan.graph, self.plan.hardware, strategy)
        return all(plan.nodes[name].proved for name in nodes if name in plan.nodes)

    def _best(self, node: str | None, changes: Sequence[Change]) -> Remedy | None:
        """The change with the largest gain; its gain is that with layers corrected, where it gains without."""
        tried = [remedy for change in changes if (remedy := self._try(node, change)) is not None]
        best = max(tried, key=lambda remedy: remedy.gain, default=None)
        is_as_corrected = not self.strategy.corrections.offsets or best is None or best.change.corrections is not None
        if best is None or is_as_corrected or best.gain < LEAST_GAIN:
            return best
        return self._try(node, best.change, corrected=True)

    # ------------------------------------------------------------ changes
    def _missing_corrections(self) -> Sequence[str]:
        """The corrections that can be made and were not: those that change thresholds or the graph only for a strategy
        of one shot, whose thresholds are estimated again."""
        made_by, names = self.strategy.made_by, [name for name in CORRECTIONS if name != "reconstruction"]
        if "estimated" in made_by or "weights" in made_by or not {"finetuned", "trained"}.isdisjoint(made_by):
            return ()
        possible = names if is_one_shot(self.strategy) else ("rounding", "bias")
        return [name for name in possible if name not in made_by.get("corrections", ())]

    def _with_correction(self, name: str) -> tuple[str, ...]:
        """The corrections of the strategy and a further one, in the order in which they are made."""
        made = self.strategy.made_by.get("corrections", ())
        return tuple(n for n in CORRECTIONS if n == name or n in made)

    def _other_bits(self, suspect: Suspect) -> Iterator[Change]:
        """The next and the most bits on the worst edge that may have more; fewer where accumulators overflow."""
        groups, bits = self.prepared.space.groups, self.strategy.bits
        for key in dict.fromkeys(self._group_of(edge) for edge in suspect.edges):
            if key not in groups or key not in bits:
                continue
            if suspect.cause == "overflow":
                others = [b for b in groups[key].choices if b < bits[key]][:2]
            else:
                wider = sorted(b for b in groups[key].choices if b > bits[key])
                others = list(dict.fromkeys([*wider[:1], *wider[-1:]]))
            yield from (Change(fix_bits={glob.escape(key): b}) for b in others)
            if others:
                return

    def _group_of(self, edge: str) -> str:
        groups = self.prepared.space.groups
        return next((key for key, group in groups.items() if edge in map(str, group.edges)), edge)

    def _impossible(self, suspect: Suspect, has_bits: bool) -> Iterator[str]:
        hardware = self.plan.hardware
        if suspect.narrow_channels and hardware.weight.granularity != "per_channel":
            yield f"a scale for each channel of its weights ({hardware.name} has one for a whole tensor)"
        if not has_bits and suspect.cause != "overflow" and suspect.edges:
            yield f"more bits on {suspect.edges[0]} (it has the most that {hardware.name} takes)"
        if not hardware.float_descs(suspect.op):
            yield f"float ({hardware.name} does not compute {suspect.op} in float)"

    # ------------------------------------------------------------ trials
    def _try(self, node: str | None, change: Change, *, corrected: bool = False) -> Remedy | None:
        """The change as a remedy; None if the hardware does not allow it, or accumulators overflow more often.

        Args:
            corrected: correct the layers as the strategy's are, and compare with the strategy as it is.
        """
        self.tried += 1
        base = self.base if corrected or change.corrections is not None else self.uncorrected
        try:
            strategy = self._apply(change, corrected)
            plan = plan_of(self.plan.graph, self.plan.hardware, strategy)
            score = self.evaluator.score(plan, strategy.bits)
        except HagoError:
            return None
        if _overflows(score) > _overflows(base):
            return None
        gain = float(score.results["sqnr"]) - float(base.results["sqnr"])
        return Remedy(node, change, gain, int(plan_cost(plan)["weight_bytes"] - self.bytes), strategy)

    def _apply(self, change: Change, corrected: bool) -> Strategy:
        """The strategy with a change.

        Args:
            corrected: of `_try`.

        Raises:
            HagoError: the hardware does not allow it.
        """
        if change.corrections is not None and is_one_shot(self.strategy):
            return self._in_one_shot(change)
        prepared, keep_float = self.prepared, self.keep_float
        if change.keep_float is not None:
            keep_float = (*keep_float, *as_strings(change.keep_float, "keep_float"))
            prepared = self._prepare(keep_float)
        # names, which are more specific, overwrite the pattern
        by_pattern = sorted(change.fix_bits.items(), key=lambda item: item[0] != ALL_WEIGHTS)
        for pattern in change.fix_bits:
            if not any(matches(name, (pattern,)) for group in prepared.space.groups.values() for name in group.names):
                raise HagoError(f"{pattern!r} has no bits where {', '.join(keep_float)} stay float")
        fixed_bits = {
            key: bits
            for pattern, bits in by_pattern
            for key, group in prepared.space.groups.items()
            if key in self.strategy.bits and any(matches(name, (pattern,)) for name in group.names)
        }
        changed = set(fixed_bits)
        resolver = self._resolver(prepared, changed, change.estimator)
        groups = resolver.space.groups
        bits = {key: _choice(group.choices, self.strategy.bits.get(key)) for key, group in groups.items()}
        bits |= fixed_bits
        point = nearest_feasible(resolver, bits, changed)
        if point is None:
            raise HagoError("no bits were found that fit every node")
        fixed = self.strategy.made_by.get("fix_bits", {})
        made_by = {
            **self.strategy.made_by,
            "keep_float": list(keep_float),
            "fix_bits": {**fixed, **change.fix_bits},
            **({} if change.estimator is None else {"estimator": change.estimator}),
        }
        changed_point = replace(prepared, resolver=resolver)
        if change.corrections is not None:
            changed_point = replace(changed_point, correction_names=change.corrections)
            made_by["corrections"] = list(change.corrections)
        if change.corrections is not None or (corrected and self.strategy.corrections.offsets):
            measured = self.evaluator.measure(point.plan)
            changed_point = correct_point(MeasuredPoint(changed_point, point.bits, measured), self.evaluator).prepared
        return make_strategy(changed_point, changed_point.resolver(point.bits), point.bits, made_by)

    def _in_one_shot(self, change: Change) -> Strategy:
        """One shot on these samples with a change, without corrections that take minutes.

        Raises:
            HagoError: the hardware does not allow it.
        """
        merged = given_options(self.strategy, self.plan.hardware).merged(change)
        options = QuantizationOptions(
            estimator=merged.estimator,
            keep_float=as_strings(merged.keep_float, "keep_float"),
            fix_bits=merged.fix_bits,
        )
        prepared = prepare(self.plan.graph.uncorrected, self.plan.hardware, self.batches, options)
        effort = named_effort(merged.effort)
        return quantize_in_one_shot(
            correct(prepared, of_seconds(merged.corrections or ()), keeps_bits=True), effort=effort
        ).strategy

    def _resolver(self, prepared: Prepared, changed: Collection[str], estimator: str | None) -> Resolver:
        """A Resolver with the strategy's thresholds where they still hold; with estimated ones only for another
        estimator."""
        graph, hardware, ops = prepared.graph, prepared.hardware, prepared.hardware.known_ops
        if estimator is not None:
            named, calibration = named_estimator(estimator), prepared.calibration
            return estimated_resolver(graph, hardware, prepared.topology, prepared.space, calibration, named, ops)
        before, now = self.prepared.space.groups, prepared.space.groups
        kept = {
            key
            for key in self.strategy.thresholds
            if key not in changed and _source_of(before, key) == _source_of(now, key)
        }
        stored = StoredThresholds(graph, self.strategy)
        thresholds = _KeptThresholds(stored, prepared.resolver.thresholds, kept)
        constants = prepared.resolver.constants
        return Resolver(graph, hardware, prepared.topology, prepared.space, thresholds, ops, constants=constants)

    def _prepare(self, keep_float: Sequence[str]) -> Prepared:
        options = QuantizationOptions(estimator=self.estimator, keep_float=keep_float)
        prepared = prepare(self.plan.graph, self.plan.hardware, self.batches, options)
        names = tuple(str(name) for name in self.strategy.made_by.get("corrections", ()))
        equalization = replace(self.strategy.corrections, offsets={})
        return replace(prepared, correction_names=names, corrections=equalization)


def _overflows(score: Score) -> int:
    return sum(score.overflows.values())


def _choice(choices: Sequence[int], bits: int | None) -> int:
    """The bits if they are a choice, else the most."""
    return choices[0] if bits is None or bits not in choices else bits


def _source_of(groups: Mapping[str, Any], key: str) -> str | None:
    return groups[key].source if key in groups else None


def _estimator_of(strategy: Strategy) -> str:
    """The estimator with which a strategy was made; mse where that is one of the user's own."""
    try:
        return named_estimator(str(strategy.made_by.get("estimator", "mse"))).name
    except HagoError:
        return "mse"
