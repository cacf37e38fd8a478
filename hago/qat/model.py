"""QatModel: a Plan as an nn.Module that can be trained and that computes what the hardware will compute.

In training, a forward pass is the Plan's own arithmetic with live weights and thresholds and straight-through
gradients (`hago.qat.forward`). In eval, it is the Simulator of the Plan that the present weights and thresholds give,
which is the Plan that `hago.from_qat` returns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hago.emulation.tensorflow import Schedule
from hago.graph import OUTPUT, Graph, channels_last, check_finite, flatten_inputs, nest_outputs, run_graph
from hago.graph.passes.fold_batch_norms import channel_axis
from hago.plan import Plan, Resolver, Space, Strategy, Topology, fuse_clamps
from hago.qat.batch_norm import FoldedNorm
from hago.qat.dorefa import DoReFaWeight, dorefa_weights, set_norm_quantizers
from hago.qat.forward import FloatPass, LivePass, NormedPass, RangeThresholds, Training
from hago.qat.optimizer import channel_sizes
from hago.qat.ranges import TrainableRange
from hago.qat.scheme import TrainingScheme
from hago.serialization.summary import Summarized, Summary, bits_text
from hago.serialization.text_table import count, counted
from hago.simulation import Simulator


class QatModel(Summarized, nn.Module):
    """A model in training for a piece of hardware. `hago.prepare_qat` and fine-tuning make it; the user trains it.

    Args:
        plan: the Plan that training starts from.
        topology, space, strategy: those from which the plan was resolved.
        ranges: by the key of the threshold.
        trainable: names of the graph's constants that become parameters.
        scheme: how gradients pass fake quantization, and whether weights and gradients are quantized as in DoReFa-Net.
        norms: by layer, batch norms that are trained through the statistics of the batch. They own the constants that
            they fold into, which are not in `trainable`.
        schedule: the training passes, counted from 1, at which quantization begins and batch norms are frozen.

    Parameters and buffers:
        step: number of forward passes in training mode.
        norms: see FoldedNorm.
        weights: one parameter per trainable constant, with dots in its name replaced by slashes.
        ranges: one for all edges that share integers; see TrainableRange.
    """

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        space: Space,
        strategy: Strategy,
        ranges: Mapping[str, TrainableRange],
        trainable: Iterable[str],
        scheme: TrainingScheme,
        norms: Mapping[str, FoldedNorm],
        schedule: Schedule,
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name.replace(".", "/"): norm for name, norm in norms.items()})
        self.schedule, self.norms_frozen = schedule, False
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.weights = nn.Module()
        self.names: dict[str, str] = {}
        for name in trainable:
            self.names[name] = name.replace(".", "/")
            value = channels_last(plan.graph.consts[name].detach().clone())
            self.weights.register_parameter(self.names[name], nn.Parameter(value))
        unique = {id(r): (key, r) for key, r in reversed(list(ranges.items()))}  # each range by its first key
        self.ranges = nn.ModuleDict({key.replace(".", "/"): r for key, r in reversed(list(unique.values()))})
        self.space, self.strategy, self.quantizing = space, strategy, True
        groups = {e: g.key for g in space.groups.values() for e in g.edges}
        self.training_plan = Training(
            plan, topology, strategy.bits, groups, dict(ranges), _fused_relus(plan), scheme.slope
        )
        self.scheme, self.dorefa = scheme.name, scheme.dorefa
        bits = {e: strategy.bits[key] for e, key in groups.items()}
        self._weight_quantizers: dict[str, DoReFaWeight] = {}
        if (dorefa := scheme.dorefa) is not None:
            starts = {name: plan.graph.consts[name] for name in self.names}
            self._weight_quantizers = dorefa_weights(plan, bits, ranges, starts, dorefa)
            set_norm_quantizers(plan, bits, ranges, self._live_norms().values(), dorefa)
        self._frozen: tuple[dict[str, Tensor], Plan, Simulator] | None = None

    def summary(self) -> Summary:
        """What is trained, the bits, and how many passes were made."""
        plan = self.training_plan.plan
        trained = [p for p in self.parameters() if p.requires_grad]
        norms = f", {len(self.norms)} batch norms" if self.norms else ""
        mode = "training, with fake quantization" if self.training else "eval, which computes what the chip will"
        return Summary(
            f"QatModel of a network of {counted(len(plan.graph.computed), 'node')} for {plan.hardware.name}",
            {
                "trains": f"{counted(len(self.names), 'weight')} and {counted(len(self.ranges), 'range')}{norms}: "
                f"{count(sum(p.numel() for p in trained))} values",
                "bits": bits_text(self.strategy.bits.values(), "groups of edges"),
                "mode": f"{mode}; {int(self.get_buffer('step'))} training passes so far",
                "next": "train it as any nn.Module, then hago.from_qat(model)",
            },
        )

    # ------------------------------------------------------------ state
    @property
    def graph(self) -> Graph:
        """The graph that training started from."""
        return self.training_plan.plan.graph

    def consts(self, *, folded: bool = True) -> dict[str, Tensor]:
        """The present value of every constant of the graph, with its gradient.

        Args:
            folded: whether to fold the live batch norms; otherwise the constants that they fold into are those that
                training started from.
        """
        live: dict[str, Tensor] = {name: self.weights.get_parameter(key) for name, key in self.names.items()}
        if self.quantizing:
            for name, quantize in self._weight_quantizers.items():
                live[name] = quantize(live[name])
        if folded:
            for norm in self._live_norms().values():
                live.update(zip(norm.site.folded, norm.folded(quantized_weight=self.quantizing), strict=True))
        return {**self.graph.consts, **live}

    def _live_norms(self) -> dict[str, FoldedNorm]:
        """The batch norms that are trained through the statistics of the batch, by layer."""
        by_layer = {}
        for norm in self.norms.values():
            assert isinstance(norm, FoldedNorm)
            by_layer[norm.site.layer.name] = norm
        return by_layer

    def freeze_norms(self, mode: bool = True) -> None:
        """Use the moving statistics of batch norms in training too, and do not update them; False reverts this."""
        self.norms_frozen = mode

    def size_of(self, name: str) -> Tensor:
        """The size of a parameter for the relative steps of RelativeAdam.

        It is a root mean square per output channel of a weight, and 1 for a range, whose parameter is already relative.

        Args:
            name: as in `named_parameters`.
        """
        value = self.get_parameter(name).detach()
        if name.startswith("ranges."):
            return torch.ones(())
        if name.startswith("norms."):
            norm = self.get_submodule(name.rpartition(".")[0])
            assert isinstance(norm, FoldedNorm)
            return channel_sizes(value, channel_axis(norm.site.layer))
        const = next(n for n, key in self.names.items() if name == f"weights.{key}")
        return channel_sizes(value, self._channel_axis(const))

    def _channel_axis(self, const: str) -> int | None:
        """The axis of the output channels of a weight; None for other constants."""
        plan = self.training_plan.plan
        for edge in self.graph.out_edges[const]:
            rule = None if edge.dst == OUTPUT else plan.ops.get(self.graph[edge.dst].op)
            weight = None if rule is None else rule.weight
            if weight is not None and weight.slot == edge.slot:
                return weight.axis
        return None

    def observe(self, mode: bool = True) -> None:
        """Update the ranges that are observed in training; with False they are kept as they are."""
        for trained in self.training_plan.ranges.values():
            trained.observing = mode

    def __deepcopy__(self, memo: dict[int, Any]) -> QatModel:
        """Copy weights and ranges, and share the plan, topology, space and strategy, which training does not change."""
        start = self.training_plan
        memo.update({id(part): part for part in (start.plan, start.topology, self.space, self.strategy)})
        memo[id(start.cache)] = {}
        memo[id(self._frozen)] = None
        twin = QatModel.__new__(QatModel)
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin

    # ------------------------------------------------------------ running
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model, nested as those of the float model; in eval without a gradient."""
        return nest_outputs(self.graph, self.run(flatten_inputs(self.graph, args, kwargs)))

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The flat outputs for flat inputs; `forward` and TrainingRun call it."""
        if self.training:
            return self._run_training(inputs)
        if self.quantizing:
            return self.frozen()[1].run(inputs)
        with torch.no_grad():
            return self._run_float(inputs, {}, observing=False)

    def _run_training(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Count a training pass, and run it quantized or, before quantization begins, in float."""
        self.get_buffer("step").add_(1)
        count = int(self.get_buffer("step"))
        frozen = self.norms_frozen or self.schedule.freezes(count)
        norms = {} if frozen else self._live_norms()
        if not (self.quantizing and self.schedule.quantizes(count)):
            return self._run_float(inputs, norms, observing=True)
        live_pass = NormedPass(self.training_plan, norms) if norms else LivePass(self.training_plan)
        live_pass.gradients = None if self.dorefa is None else self.dorefa.gradients(count)
        laid_out = [channels_last(x) for x in inputs]
        outputs = run_graph(self.graph, laid_out, live_pass, consts=self.consts(folded=frozen))
        return [live_pass.real(name, value) for name, value in zip(self.graph.outputs, outputs, strict=True)]

    def _run_float(self, inputs: Sequence[Tensor], norms: Mapping[str, FoldedNorm], *, observing: bool) -> list[Any]:
        float_pass = FloatPass(self.training_plan, norms, observing=observing)
        return run_graph(self.graph, inputs, float_pass, consts=self.consts(folded=not norms))

    # ------------------------------------------------------------ freezing
    def frozen(self) -> tuple[Plan, Simulator]:
        """The Plan of the present weights and thresholds, and its simulator; cached until they change."""
        with torch.no_grad():
            consts = {name: t.detach() for name, t in self.consts().items()}
        state = self.state_dict()
        if self._frozen is None or not _equal(self._frozen[0], state):
            copied = {name: t.detach().clone() for name, t in state.items()}
            consts = {name: t.clone(memory_format=torch.contiguous_format) for name, t in consts.items()}
            for name in consts:
                if self.graph.consts[name].is_floating_point():
                    check_finite(name, consts[name])
            plan = self._resolve(consts)
            self._frozen = (copied, plan, Simulator(plan))
        return self._frozen[1:]

    def _resolve(self, consts: Mapping[str, Tensor]) -> Plan:
        start = self.training_plan
        graph = replace(self.graph, consts=dict(consts), corrected_from=None)
        source = RangeThresholds(start.ranges)
        resolver = Resolver(graph, start.plan.hardware, start.topology, self.space, source, start.plan.ops)
        with torch.no_grad():
            return resolver(start.bits)


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts are equal but for the number of training passes."""
    return all(torch.equal(a[name], t) for name, t in b.items() if name != "step")


def _fused_relus(plan: Plan) -> frozenset[str]:
    """The relus that need no computation, because the clipping at all their readers does the same."""
    relus = set()
    for name in fuse_clamps(plan).skipped:
        form = plan.ops[plan.graph[name].op].integer
        assert form is not None and form.limits is not None
        low, high = form.limits(plan.nodes[name].attrs)
        if isinstance(low, int) and low == 0 and high is None:
            relus.add(name)
    return frozenset(relus)
