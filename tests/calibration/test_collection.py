"""The pass over the calibration data keeps what later steps would otherwise run the network for again."""

from __future__ import annotations

import torch
from networks import Uneven, images
from torch import Tensor, nn

from hago.calibration import collect
from hago.data import Batch
from hago.graph import from_torch, run_real

DATA = [images(size, 3, 8, 8, seed=size) for size in (8, 8, 3)]


def test_the_largest_magnitudes_of_what_clamps_read_are_those_of_all_samples() -> None:
    graph = from_torch(Uneven(high=1.0).eval(), (DATA[0],))
    values: dict[str, list[Tensor]] = {}
    for batch in DATA:
        run_real(graph, [batch], lambda node, value: values.setdefault(node.name, []).append(value))
    read = {node.inputs[0] for node in graph if node.op == "clamp"}
    for observed in ((), read):
        found = collect(graph, [Batch((batch,), None) for batch in DATA], observed)
        assert found.clamped.keys() == read and len(read) == 2
        for name, largest in found.clamped.items():
            assert torch.equal(largest, torch.cat(values[name]).abs().amax(0, keepdim=True))
        for name, (low, high) in found.ranges.items():
            whole = torch.cat([value.flatten() for value in values[name]])
            assert (low, high) == (float(whole.min()), float(whole.max()))


def test_the_statistics_of_the_first_batches_are_those_of_a_pass_over_them() -> None:
    graph = from_torch(Uneven(high=1.0).eval(), (DATA[0],))
    batches, names = [Batch((batch * (i + 1),), None) for i, batch in enumerate(DATA)], {n.name for n in graph.computed}
    for samples, count in ((8, 1), (16, 2), (19, 3)):
        found, alone = collect(graph, batches, names, first_samples=samples), collect(graph, batches[:count], names)
        assert found.first_samples == samples and found.of_first.keys() == alone.statistics.keys()
        for name, seen in alone.statistics.items():
            for part in ("minimum", "maximum", "mean_minimum", "mean_maximum", "histogram", "limit"):
                assert torch.equal(getattr(found.of_first[name], part), getattr(seen, part))
            assert found.of_first[name].count == seen.count
    for samples in (0, 4, 17, 20):
        found = collect(graph, batches, names, first_samples=samples)
        assert not found.of_first and found.first_samples == 0


class _BatchInside(nn.Module):
    """A clamp whose value has the samples along its second axis."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu6(x.transpose(0, 1)).transpose(0, 1)


def test_values_whose_shape_differs_between_batches_have_no_entries() -> None:
    graph = from_torch(_BatchInside().eval(), (DATA[0],))
    batches = [Batch((batch,), None) for batch in DATA]
    assert collect(graph, batches[:2], ()).clamped
    assert not collect(graph, batches, ()).clamped


def test_no_entries_are_kept_where_nothing_is_clamped() -> None:
    graph = from_torch(Uneven().eval(), (DATA[0],))
    assert not collect(graph, [Batch((batch,), None) for batch in DATA], ()).clamped
