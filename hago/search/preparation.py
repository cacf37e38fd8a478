"""Prepare a model for a search: import it, analyze its topology, build its space of bits and calibrate.

`prepare` is called once by every search and one-shot quantization. A stored strategy is applied to its model without
calibration: see `hago.search.stored_strategy`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hago.calibration import (
    CHANNEL_BINS,
    SOFTMAX_SPAN,
    Calibration,
    Estimator,
    GivenRanges,
    ModesLike,
    ThresholdsLike,
    collect,
    make_given_ranges,
    named_estimator,
)
from hago.correction import CorrectionPass, Corrections, OffsetConstants
from hago.cost import METRICS, node_macs, prices_float
from hago.data import CALIBRATION_DATA, HELD_OUT_DATA, Batches, JobProgress, warn_if_shared
from hago.errors import DataError, HagoWarning, as_strings
from hago.graph import OUTPUT, Graph, ModelLike
from hago.hardware import Hardware
from hago.importing import HardwareLike, as_hardware, import_with_data, read_batches
from hago.ops import Ops
from hago.plan import (
    Resolver,
    Space,
    Topology,
    analyze,
    build_space,
    estimated_resolver,
    expand_policies,
    with_kinds,
)
from hago.plan.feasibility import prune_infeasible_choices
from hago.plan.topology import warn_of_unknown
from hago.runtime.native import exact_kernels
from hago.search.folds import first_tuning_samples


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """Which values are quantized, and how their thresholds are found: the options that searches, one-shot quantization
    and sensitivities share. `hago.search_quantize_strategy` explains each.

    Args:
        search_topology: whether the space chooses between integer and float, too. In a search, None lets the costs in
            use decide; elsewhere it stands for no.
        corrections: names of those that may be made; see `hago.search.correcting`.
        effort: a name of `hago.search.effort.EFFORTS`, which stands for corrections and a searcher where none are
            given; None for the default, or for that of the log that is continued.
        channel_bins: bins of the histogram of a channel of a constant, from which its threshold is estimated; earlier
            logs have more.
        softmax_span: how far below the largest of a row inputs of a softmax count in statistics; None, as in earlier
            logs, for all as they are.
    """

    estimator: str | Estimator | None = None
    keep_float: str | Sequence[str] = ()
    fix_bits: Mapping[str, int] | None = None
    thresholds: ThresholdsLike | GivenRanges | None = None
    modes: ModesLike | None = None
    search_topology: bool | None = None
    corrections: str | Sequence[str] | None = None
    effort: str | None = None
    channel_bins: int = CHANNEL_BINS
    softmax_span: float | None = SOFTMAX_SPAN


@dataclass(frozen=True, slots=True)
class Prepared:
    """A calibrated graph on a piece of hardware. `prepare` makes it; searches and one-shot quantization start from it.

    Args:
        keep_float, fix_bits: the patterns of the user, and those that given modes stand for.
        refinement_record: whether thresholds are those of refinement; where samples were kept aside to confirm them,
            the figures found on these, as JSON values.
        correction_names: of the corrections that may be made.
        corrections: those of the graph; those of the integers of constants are the resolver's.
        passes: what the passes of corrections gained that were tried, in their order.
        merges_groups: whether integer programs merge groups and remember solutions, as those of earlier logs did not.
        traces_feeds: whether bits of nodes further up are lowered where an accumulator overflows whose operands have
            none of their own, as they were not in earlier logs.
    """

    graph: Graph
    hardware: Hardware
    batches: Batches
    topology: Topology
    space: Space
    calibration: Calibration
    estimator: Estimator
    resolver: Resolver
    keep_float: tuple[str, ...] = ()
    fix_bits: Mapping[str, int] = field(default_factory=dict)
    refinement_record: bool | Mapping[str, Any] = False
    correction_names: tuple[str, ...] = ()
    corrections: Corrections = field(default_factory=Corrections)
    passes: tuple[CorrectionPass, ...] = ()
    merges_groups: bool = True
    traces_feeds: bool = True

    @property
    def without_row(self) -> tuple[str, ...]:
        """The nodes whose thresholds are estimated although ranges of others were given."""
        given, consts = self.calibration.given, self.graph.consts
        groups = ((k, g.source) for k, g in self.space.groups.items() if g.source not in consts)
        return tuple(dict.fromkeys(source for key, source in groups if given.named(key, source) is None))

    def corrected(self, corrections: Corrections) -> Prepared:
        """The same with corrections applied to the model, calibrated anew."""
        ops, old = self.hardware.known_ops, self.calibration
        graph = corrections.apply(self.graph, ops)
        changed = replace(self, graph=graph, corrections=corrections)
        if {n.name: n.op for n in graph} != {n.name: n.op for n in self.graph}:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HagoWarning)  # what was warned of holds for this graph, too
                return changed._analyzed()
        seen = _collected(graph, self.batches, old.statistics.keys(), ops, old.softmax_span)
        calibration = replace(seen, given=old.given, channel_bins=old.channel_bins)
        resolver = estimated_resolver(graph, self.hardware, self.topology, self.space, calibration, self.estimator, ops)
        return replace(changed, calibration=calibration, resolver=resolver).pruned()

    def _analyzed(self) -> Prepared:
        """The same with the topology and the space of its graph, calibrated anew."""
        made = _calibrated(
            self.graph,
            self.hardware,
            self.batches,
            self.calibration.given,
            self.estimator,
            self.keep_float,
            self.fix_bits,
            search_topology=any(group.is_kind for group in self.space.groups.values()),
            channel_bins=self.calibration.channel_bins,
            softmax_span=self.calibration.softmax_span,
        )
        return replace(
            made,
            correction_names=self.correction_names,
            corrections=self.corrections,
            passes=self.passes,
            traces_feeds=self.traces_feeds,
        )

    @property
    def offsets(self) -> Mapping[str, Tensor]:
        """By how much the integers of constants, by name, differ from the nearest."""
        constants = self.resolver.constants
        return constants.offsets if isinstance(constants, OffsetConstants) else {}

    def with_offsets(self, offsets: Mapping[str, Tensor]) -> Prepared:
        """The same with the integers of constants, by name, moved by offsets."""
        constants = OffsetConstants(self.graph, offsets, self.hardware.requantize.rounding) if offsets else None
        return replace(self, resolver=self.resolver.with_constants(constants))

    def pruned(self) -> Prepared:
        """The same without the choices of bits that fit no signature of the hardware."""
        fits = prune_infeasible_choices(self.resolver)
        return self if fits is self.space else replace(self, space=fits, resolver=self.resolver.with_space(fits))

    def with_most_bits(self, bits: int) -> Prepared:
        """The same with at most so many bits in every group that a node with multiply-accumulates reads; such a group
        that has only more gets its fewest. Others, as those of residual sums, stay."""
        graph, ops = self.graph, self.hardware.known_ops
        multiplies = {node.name for node in graph.computed if node_macs(graph, node, ops)}
        groups = dict(self.space.groups)
        for key, group in groups.items():
            if not group.is_kind and any(edge.dst in multiplies for edge in group.edges):
                few = tuple(b for b in group.choices if b <= bits)
                groups[key] = replace(group, choices=few or group.choices[-1:])
        space = Space(groups)
        return replace(self, space=space, resolver=self.resolver.with_space(space))

    def unobserved(self) -> Prepared:
        """The same with batches that call nothing, for use after the job that showed its progress."""
        return replace(self, batches=self.batches.observed(None))


def prepare(
    model: ModelLike,
    hardware: HardwareLike,
    dataset: Iterable[Any],
    options: QuantizationOptions = QuantizationOptions(),
    *,
    made_for: Collection[str] = (),
    steps: JobProgress | None = None,
    samples: int | None = None,
) -> Prepared:
    """Import the model, analyze its topology, build the space of bits, calibrate, and drop the choices of bits that fit
    no signature of the hardware.

    Args:
        made_for: of from_torch.
        steps: shows the progress, also of later passes over the batches (see `Prepared.unobserved`); None for none.
        samples: the most samples that are looked at, see `Batches.thinned`; None for all.

    Raises:
        HagoError: whatever is wrong with the model, the hardware, the data, the patterns or the tables.
    """
    chip = as_hardware(hardware)
    announce = JobProgress("", shown=False) if steps is None else steps
    announce("reading the data and importing the model")
    graph, batches = import_with_data(
        model,
        dataset,
        chip,
        made_for=made_for,
        on_batch=None if steps is None else steps.on_batch,
        role=CALIBRATION_DATA,
    )
    batches = batches.thinned(samples)
    given = make_given_ranges(options.thresholds, options.modes, chip).at(graph)
    kept = (*as_strings(options.keep_float, "keep_float"), *given.float_patterns())
    warn_of_unknown(graph, chip)
    estimator = named_estimator(default_estimator(chip) if options.estimator is None else options.estimator)
    announce("loading kernels (a first run builds them)")
    exact_kernels()
    announce("calibrating")
    return _calibrated(
        graph,
        chip,
        batches,
        given,
        estimator,
        kept,
        options.fix_bits,
        search_topology=bool(options.search_topology),
        channel_bins=options.channel_bins,
        softmax_span=options.softmax_span,
    )


def _calibrated(
    graph: Graph,
    chip: Hardware,
    batches: Batches,
    given: GivenRanges,
    estimator: Estimator,
    kept: tuple[str, ...],
    fixed: Mapping[str, int] | None,
    *,
    search_topology: bool,
    channel_bins: int,
    softmax_span: float | None,
) -> Prepared:
    """Analyze the topology of a graph, build its space of bits, calibrate, and drop the choices of bits that fit no
    signature of the hardware."""
    ops = chip.known_ops
    topology = analyze(graph, chip, expand_policies(kept, graph, chip, ops), ops)
    if given.modes:
        groups = build_space(graph, chip, topology, None, ops).groups
        group_of = {str(edge): key for key, group in groups.items() for edge in group.edges}
        fixed = {**(fixed or {}), **given.fixed_bits(graph, group_of)}
    space = build_space(graph, chip, topology, fixed, ops)
    observed = {g.source for g in space.groups.values()}
    if search_topology:
        # another topology quantizes other edges
        space = with_kinds(space, chip, topology, graph)
        observed |= {graph.source(e) for e in graph.edges if e.dst != OUTPUT and topology.edges[e]}
    seen = _collected(graph, batches, observed, ops, softmax_span)
    calibration = replace(seen, given=given, channel_bins=channel_bins)
    resolver = estimated_resolver(graph, chip, topology, space, calibration, estimator, ops)
    prepared = Prepared(
        graph=graph,
        hardware=chip,
        batches=batches,
        topology=topology,
        space=space,
        calibration=calibration,
        estimator=estimator,
        resolver=resolver,
        keep_float=kept,
        fix_bits=dict(fixed or {}),
    )
    return prepared.pruned()


def _collected(
    graph: Graph, batches: Batches, observed: Collection[str], ops: Ops, softmax_span: float | None
) -> Calibration:
    """The statistics of all samples, and where a batch ends before the samples that confirm thresholds, of those before
    it, from one pass."""
    first = first_tuning_samples(batches.sizes)
    return collect(graph, batches, observed, ops, softmax_span, exact_kernels().count_bins, first)


def default_estimator(hardware: Hardware) -> str:
    """The estimator of thresholds where the user names none: `power2_range` where the hardware requires powers of two,
    else `mse`."""
    return "power2_range" if hardware.requantize.power_of_two else "mse"


def with_search_topology(
    options: QuantizationOptions, costs: Sequence[str], hardware: Hardware | None
) -> QuantizationOptions:
    """The options with `search_topology` decided: by default it is searched where a cost in use depends on it, and the
    hardware, if it is known, has the figures of nodes in float."""
    if options.search_topology is not None:
        return options
    priced = all(hardware is None or prices_float(name, hardware) for name in costs)
    return replace(options, search_topology=priced and any(METRICS[name].depends_on_float for name in costs))


def import_with_held_out(
    model: ModelLike,
    hardware: Hardware,
    dataset: Iterable[Any],
    held_out: Iterable[Any] | None,
    *,
    labels: bool = False,
    made_for: Collection[str] = (),
    steps: JobProgress,
) -> tuple[Graph, Batches, Batches | None]:
    """The model imported, the calibration data and the held-out data, all checked before any work on them begins.

    Args:
        held_out: None for no held-out data.
        labels: of held_out_batches.
        made_for: of from_torch.
        steps: shows the progress, also that of later passes over the calibration data.

    Raises:
        HagoError: the model cannot be imported, or data is not what it takes.
    """
    steps("reading the data and importing the model")
    graph, batches = import_with_data(
        model, dataset, hardware, made_for=made_for, on_batch=steps.on_batch, role=CALIBRATION_DATA
    )
    if held_out is None:
        return graph, batches, None
    steps("reading the held-out data")
    return graph, batches, held_out_batches(model, batches, held_out, labels)


def held_out_batches(model: ModelLike, calibration: Batches, dataset: Iterable[Any], labels: bool) -> Batches:
    """Batches that a search does not see, checked before it begins.

    Args:
        calibration: the batches that it sees.
        labels: whether they have to be classes.

    Raises:
        DataError: empty, ragged, not finite, without the labels, or samples of other shapes or dtypes than those of
            the calibration.
    """
    found = read_batches(model, dataset, HELD_OUT_DATA, like=calibration)
    got, known = (_kinds(batches) for batches in (found, calibration))
    if got != known:
        raise DataError(
            f"{found.title} has samples of {got}; the {CALIBRATION_DATA} has {known}; prepare both in the same way"
        )
    if labels and not found.classed:
        raise DataError(f"{found.title}: the objective needs labels that are classes; pass (inputs, labels) batches")
    warn_if_shared(found.statistics, calibration.statistics)
    return found


def _kinds(batches: Batches) -> str:
    """Shapes and dtypes of samples."""
    return ", ".join(f"{tuple(x.shape[1:])} {x.dtype}" for x in batches.statistics.first)
