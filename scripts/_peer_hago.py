"""hago's search for a front on one network, as a peer among peers: all points that were on its front."""

from __future__ import annotations

import sys
from typing import Any

import torch
from _peer_points import Task
from torch import Tensor, nn

from hago.cost import Cost, plan_cost
from hago.importing import as_hardware, import_with_data
from hago.runtime.native import NativeIntegerModel
from hago.search import SearchOptions, plan_of, run_search
from hago.search.pareto_front import FrontPoint, FrontWriter, ParetoFront
from hago.search.running import RunningSearch
from hago.search.session import SearchOutcome
from hago.study import Trial


def main() -> None:
    """Search, and hand over every model that was on the front, with the time at which it was."""
    task, (hardware, searcher, effort) = Task(), sys.argv[5:8]
    data = [(x,) for x in task.batches()]
    network = task.network()
    fronts: list[tuple[float, ParetoFront]] = []
    after: dict[int, float] = {}
    replace = FrontWriter.replace

    def watched(writer: FrontWriter, front: ParetoFront) -> None:
        if not fronts:
            fronts.append((0.0, writer.front))
        replace(writer, front)
        fronts.append((task.seconds(), front))

    def on_trial(_: RunningSearch, trial: Trial) -> None:
        after[trial.index] = task.seconds()

    def search(network: nn.Module, data: list[tuple[Tensor]], **more: Any) -> SearchOutcome:
        # peers, too, may leave layers float
        how = SearchOptions.of(searcher=searcher, effort=effort, progress=False, search_topology=True, **more)
        return run_search(network, hardware, data, how)

    # what is loaded at its first use is not in the times
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).eval()
    search(tiny, [(torch.rand(4, 3, 8, 8),)])
    FrontWriter.replace = watched  # type: ignore[method-assign]
    task.start()
    found = search(network, data, callbacks=[on_trial])
    seconds = task.seconds()
    graph, _ = import_with_data(network, data)
    handed: list[FrontPoint] = []
    for then, front in [*fronts, (seconds, found.front)]:
        for point in (p for p in front if p not in handed):
            handed.append(point)
            plan = plan_of(graph, as_hardware(hardware), point.strategy)
            model, cost = NativeIntegerModel(plan), plan_cost(plan)

            def run(x: Tensor, model: NativeIntegerModel = model) -> Tensor:
                return torch.as_tensor(model(x))

            known = then or after[point.trial]  # before layers are corrected, as soon as the trial was measured
            task.add(run, bits_of(cost, 1), bits_of(cost, 0), f"trial {point.trial}", known)
    task.end(seconds)


def bits_of(cost: Cost, slot: int) -> dict[str, float]:
    """By node with weights, of that operand; 32 where it is float."""
    edges = {e.edge: e for e in cost.edges}
    whole = {n.node: n.integer for n in cost.nodes}
    names = [e.rpartition(":")[0] for e, edge in edges.items() if edge.kind == "weight" and e.endswith(":1")]
    return {n: float(edges[f"{n}:{slot}"].bits) if whole[n] else 32.0 for n in names}


if __name__ == "__main__":
    main()
