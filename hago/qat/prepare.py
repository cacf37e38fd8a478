"""The beginning and the end of quantization-aware training: `prepare_qat` makes a QatModel of a model, and `from_qat`
makes a Quantizer of a trained one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from hago.arithmetic.equality import equal
from hago.arithmetic.schemes import TWO_SIDED
from hago.arithmetic.types import QParams
from hago.calibration import Estimator
from hago.correction import Corrections
from hago.emulation.tensorflow import Schedule
from hago.errors import HagoError, as_strings, check_choice
from hago.graph import CONST, Graph, ModelLike
from hago.graph.passes import fold_for, passes_after_folding
from hago.hardware import Hardware
from hago.importing import HardwareLike, StrategyLike, as_hardware, as_strategy, import_for_strategy, import_with_data
from hago.plan import POLICY_PREFIX, Plan, Resolver, StoredThresholds, Strategy, store_thresholds
from hago.qat.batch_norm import FoldedNorm, NormStyle, folded_sites
from hago.qat.dorefa import set_activation
from hago.qat.model import QatModel
from hago.qat.ranges import TrainableRange
from hago.qat.scheme import TrainingScheme, training_scheme
from hago.search import (
    QuantizationOptions,
    Quantizer,
    plan_of,
    prepare,
    quantize_in_one_shot,
    stored_resolver,
)
from hago.serialization.summary import names_text

#: A range with more integers than these is not learned: its quanta are too fine to matter.
MOST_LEARNED: Final = 1 << 16
#: Momentum of a batch norm whose module is not known, as in an ExportedProgram: torch's default.
MOMENTUM: Final = 0.1


def prepare_qat(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike | None = None,
    dataset: Iterable[Any] | None = None,
    *,
    scheme: str | TrainingScheme = "lsq",
    policy: str = "hardware",
    norms: NormStyle | None = None,
    quant_delay: int = 0,
    freeze_bn_delay: int | None = None,
    estimator: str | Estimator | None = None,
    keep_float: str | Sequence[str] = (),
    fix_bits: Mapping[str, int] | None = None,
    example_inputs: Sequence[Any] = (),
) -> QatModel:
    """Make a model that trains in an ordinary PyTorch loop and computes what the hardware will compute.

    The weights are copied: `model` is not changed, and the optimizer must be made for the parameters of the model that
    is returned.

    Args:
        model: an nn.Module in eval mode, an ExportedProgram, or a Graph.
        hardware: a Hardware, a name in hardware_specs, or a path.
        strategy: bits and thresholds to start from; made from `dataset` if not given.
        dataset: calibration batches; only read if there is no strategy.
        scheme: hago, lsq, nudged, tensorflow, oneflow, pytorch or dorefa, or a TrainingScheme: how ranges change
            and gradients pass.
        policy: hardware, tensorflow or dorefa: which nodes stay float beyond those that the hardware cannot run in
            integers; see docs/quantizers.md.
        norms: how batch norms are trained; by default as the scheme does. `frozen`: they are folded before training,
            and the folded weight is trained; `tensorflow`, `oneflow`: they are folded, but normalize by the
            statistics of the batch. Batch norms that cannot be folded are always frozen.
        quant_delay: number of training passes before the first quantized one, counted as TensorFlow does.
        freeze_bn_delay: the training pass from which on batch norms use their moving statistics.
        estimator, keep_float, fix_bits: as in `hago.quantize`; like the policy, only used if there is no strategy.
        example_inputs: to export an nn.Module with, as for `hago.create_quantizer`.

    Raises:
        StrategyMismatch: the strategy was made for another model or hardware.
        HagoError: there is neither a strategy nor data; a parameter of the model has a gradient that no optimizer step
            has used; batch norms are not frozen, and a pass after folding changes the weights of their layers; other
            bad input.
    """
    training = training_scheme(scheme)
    chip = as_hardware(hardware)
    _check_no_pending_gradient(model)
    if strategy is not None:
        initial = as_strategy(strategy)
        unfolded = import_for_strategy(model, initial, example_inputs, chip, fold=False)
        graph = fold_for(unfolded, chip.known_ops, made_for=[initial.model_hash])
    elif dataset is not None:
        keep = (*([] if policy == "hardware" else [POLICY_PREFIX + policy]), *as_strings(keep_float, "keep_float"))
        unfolded, batches = import_with_data(model, dataset, chip, fold=False)
        graph = fold_for(unfolded, chip.known_ops)
        options = QuantizationOptions(estimator=estimator, keep_float=keep, fix_bits=fix_bits)
        initial = quantize_in_one_shot(prepare(graph, chip, batches, options)).strategy
    else:
        raise HagoError("prepare_qat needs a strategy, or a data set to calibrate on")
    style = training.norms if norms is None else norms
    changes = initial.corrections
    if (changes.equalization or changes.absorption or changes.rotations) and style != "frozen":
        raise HagoError(
            f"the strategy's corrections changed the constants into which batch norms are folded, and norms={style!r} "
            "trains these norms from their own; use norms='frozen', or a strategy made with corrections='none'"
        )
    live_norms = _live_norms(model, unfolded, graph, style)
    schedule = Schedule(quant_delay, freeze_bn_delay)
    return make_trainable(graph, chip, initial, training, norms=live_norms, schedule=schedule)


def _live_norms(model: ModelLike, unfolded: Graph, folded: Graph, style: str) -> dict[str, FoldedNorm]:
    """The batch norms that are trained through the statistics of the batch, by layer."""
    check_choice("norms", style, ("frozen", "tensorflow", "oneflow"))
    if style == "frozen":
        return {}
    live = {}
    for site in folded_sites(unfolded, folded):
        module = dict(model.named_modules()).get(site.norm.name) if isinstance(model, nn.Module) else None
        momentum = getattr(module, "momentum", MOMENTUM)
        if momentum is None:
            raise HagoError(
                f"batch norm {site.norm.name!r} keeps a cumulative average (momentum=None), which cannot be trained "
                "on; give it a momentum, or norms='frozen'"
            )
        norm = FoldedNorm(site, unfolded, style, momentum, unfolded.untrained - {*site.norm.inputs[3:]})
        _check_folded(norm, folded)
        live[site.layer.name] = norm
    return live


def _check_folded(norm: FoldedNorm, folded: Graph) -> None:
    """Refuse a batch norm whose layer a later pass has changed: training would start from other weights than those.

    Raises:
        HagoError: the folded weight or bias is not the one of the graph.
    """
    site = norm.site
    with torch.no_grad():
        constants = norm.folded()
    if all(equal(constant, folded.consts[name]) for constant, name in zip(constants, site.folded, strict=True)):
        return
    later = ", ".join(passes_after_folding()) or "unknown"
    raise HagoError(
        f"batch norm {site.norm.name!r} is trained with norms={norm.style!r} from the weight of {site.layer.name!r} "
        f"before it was folded, but a later pass over the graph ({later}) changed that weight; "
        "use norms='frozen'"
    )


def make_trainable(
    graph: Graph,
    hardware: Hardware,
    strategy: Strategy,
    scheme: TrainingScheme,
    *,
    norms: Mapping[str, FoldedNorm] | None = None,
    schedule: Schedule | None = None,
) -> QatModel:
    """Make a QatModel of a graph and a strategy. `prepare_qat` and fine-tuning call it.

    Args:
        norms, schedule: as in QatModel; by default no batch norms are trained, and all passes are quantized.

    Raises:
        StrategyMismatch: the strategy is for another model or hardware.
        HagoError: it computes norms or channels apart, stores a weight once more, clamps have limits for each channel,
            or a weight has scales of its groups, which are not trained.
    """
    if strategy.corrections.splits:
        raise HagoError(
            "the strategy computes norms once more or channels in parts, which the weights of the model's own modules "
            "cannot hold once they are trained; make the strategy without splitting: corrections=['equalization', "
            "'thresholds', 'rounding', 'bias'] (--corrections equalization ...)"
        )
    if strategy.corrections.clamps:
        raise HagoError(
            f"the strategy gives {names_text(strategy.corrections.clamps)} a limit for each channel, which the model's "
            "own modules cannot hold once it is trained; make the strategy without equalization: "
            "corrections=['thresholds', 'rounding', 'bias'] (--corrections thresholds ...)"
        )
    resolver = stored_resolver(graph, hardware, strategy)
    if resolver.graph.consts.keys() != graph.consts.keys():
        raise HagoError(
            "the strategy rotates a constant that nodes share in a way of its own for each of them, which the weights "
            "of the model's own modules cannot hold once they are trained; make the strategy without rotation: "
            "corrections=['equalization', 'thresholds', 'rounding', 'bias'] (--corrections equalization ...)"
        )
    if strategy.corrections.offsets:
        # training starts from float weights, of which those integers are the nearest
        graph = resolver.graph if norms else _with_integers_of(resolver(strategy.bits), strategy.corrections.offsets)
        thresholds, ops = StoredThresholds(graph, strategy), resolver.ops
        resolver = Resolver(graph, hardware, resolver.topology, resolver.space, thresholds, ops)
    plan, graph = resolver(strategy.bits), resolver.graph
    _check_no_groups(plan)
    consts = [n.name for n in graph if n.op == CONST and graph.consts[n.name].is_floating_point()]
    norms = norms or {}
    folded = {name for norm in norms.values() for name in norm.site.folded}
    trainable = [name for name in consts if name not in folded and name not in graph.untrained]
    return QatModel(
        plan,
        resolver.topology,
        resolver.space,
        strategy,
        _trainable_ranges(plan, scheme),
        trainable,
        scheme,
        norms,
        schedule or Schedule(),
    )


def _check_no_groups(plan: Plan) -> None:
    """Refuse weights whose groups have scales of their own.

    Raises:
        HagoError: names the first such edge.
    """
    for edge, weight in plan.weights.items():
        if weight.qparams.group is not None:
            raise HagoError(
                f"the weight on edge {str(edge)!r} has a scale for every {weight.qparams.group} entries, and only "
                "scales per tensor and per channel are trained; train for a signature without granularity"
            )
    for name, node in plan.nodes.items():
        if node.groups is not None:
            raise HagoError(
                f"the groups of the weight of node {name!r} have multipliers, which are not trained; train for a "
                "signature without granularity"
            )


def _with_integers_of(plan: Plan, names: Collection[str]) -> Graph:
    """The graph of a Plan whose named constants have the real values of the Plan's integers."""
    graph, consts = plan.graph, dict(plan.graph.consts)
    for node in (n for n in graph.computed if n.name in plan.nodes):
        for slot, integers in plan.nodes[node.name].consts.items():
            target = plan.nodes[node.name].operands[slot]
            if target is not None and node.inputs[slot] in names:
                consts[node.inputs[slot]] = (integers.to(torch.float64) * target.scale).to(torch.float32)
    return replace(graph, consts=consts, corrected_from=graph.uncorrected)


def from_qat(trained: nn.Module) -> Quantizer:
    """Make a Quantizer of a trained model, whose simulation and integer model equal `trained.eval()`.

    The strategy is for the trained float model, `quantizer.plan.graph`, which can be passed wherever a model is asked
    for. It records the training scheme, and no measures: those of the start were taken before training.

    Args:
        trained: made by `prepare_qat`; one wrapped in DistributedDataParallel is unwrapped.

    Raises:
        HagoError: the model was not made by `prepare_qat`, or a weight is NaN or infinite.
    """
    inner = getattr(trained, "module", trained)
    if not isinstance(inner, QatModel):
        raise HagoError(f"from_qat got a {type(inner).__name__}; expected what hago.prepare_qat returned")
    plan, _ = inner.frozen()
    start = inner.strategy
    # the figures were measured before training; the key "weights" requests that weights be rounded to DoReFa's
    # levels, on which the trained ones are already
    origin = {k: v for k, v in start.made_by.items() if k not in ("results", "held_out", "weights")}
    origin["trained"] = {"scheme": inner.scheme}
    thresholds = store_thresholds(plan)
    strategy = replace(
        start, model_hash=plan.graph.model_hash, thresholds=thresholds, made_by=origin, corrections=Corrections()
    )
    return Quantizer(plan_of(plan.graph, plan.hardware, strategy), strategy)


def _check_no_pending_gradient(model: ModelLike) -> None:
    """Refuse a model whose gradients were computed but not yet used by an optimizer."""
    if isinstance(model, nn.Module):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and bool((parameter.grad != 0).any()):
                raise HagoError(
                    f"parameter {name!r} holds a gradient that no optimizer step has used; prepare_qat copies the "
                    "weights, so that step would be lost: take it, or drop it with model.zero_grad()"
                )


def _trainable_ranges(plan: Plan, scheme: TrainingScheme) -> dict[str, TrainableRange]:
    """The ranges of a Plan by the key of the threshold; edges that read the same integers of a node share one."""
    ranges: dict[str, TrainableRange] = {}
    output_ranges: dict[int, TrainableRange] = {}  # by the identity of the output's qparams
    operand_ranges: dict[tuple[str, int], TrainableRange] = {}  # by source, and the identity of the target

    def operand_range(key: str, source: str, target: QParams, ends: tuple[Tensor, Tensor]) -> TrainableRange:
        integers = (source, id(target))
        if integers not in operand_ranges:
            operand_ranges[integers] = _trainable_range(plan, scheme, key, source, target, ends)
        return operand_ranges[integers]

    for name, node in plan.nodes.items():
        for key, ends in node.thresholds.items():
            slot = key.rpartition(":")[2]
            if slot == "out":
                ranges[key] = output_ranges[id(node.out)] = _trainable_range(plan, scheme, key, name, node.out, ends)
                continue
            source, target = plan.graph[name].inputs[int(slot)], node.operands[int(slot)]
            assert target is not None
            emitted = output_ranges.get(id(target)) if node.simqs[int(slot)] is None else None
            ranges[key] = emitted or operand_range(key, source, target, ends)
    for edge, weight in plan.weights.items():
        assert weight.threshold is not None
        ranges[str(edge)] = operand_range(str(edge), plan.graph.source(edge), weight.qparams, weight.threshold)
    return ranges


def _trainable_range(
    plan: Plan, scheme: TrainingScheme, key: str, source: str, target: QParams, ends: tuple[Tensor, Tensor]
) -> TrainableRange:
    """A new range for the value of `source`, which starts at the thresholds `ends`."""
    graph, hardware = plan.graph, plan.hardware
    const = source in graph.consts
    origin = scheme.weight if const else scheme.activation
    grid = (hardware.weight if const else hardware.activation).scheme
    if target.dtype.bits > 16 or hardware.requantize.power_of_two:
        grid = "hago"
    shape = graph[source].shape or ()
    low, high = ends
    trained = TrainableRange(
        f"edge {key}",
        low,
        high,
        two_sided=grid in TWO_SIDED,
        learned=origin.learned and target.qmax - target.qmin <= MOST_LEARNED,
        features=math.prod(shape if const else shape[1:]) // low.numel(),
        levels=max(abs(target.qmin), abs(target.qmax)),
        average=None if origin.average is None else origin.average(low.numel()),
    )
    dorefa = scheme.dorefa
    if dorefa and not (dorefa.relative or const or trained.signed) and target.dtype.bits <= 16:
        set_activation(trained, target, grid)
    return trained
