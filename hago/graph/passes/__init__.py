"""Passes: functions from Graph to Graph, one file each, and the table of those that every import applies.

A new pass is a file of this folder and an entry at its place in `PASSES`. What depends on calibration data, such as
factors between layers, is no pass but a correction; see `hago.correction`. `from_torch` and training read the table.
Batch norms that train through the statistics of the batch
(`hago.qat.batch_norm`) start from the graph before `fold_batch_norms`. So a pass that changes weights stands before it,
where it finds batch norms as nodes, or `prepare_qat` refuses to train these norms unless they are frozen.

`Graph.model_hash`, by which strategies, logs and stored models name their model, is that of the graph after all passes.
So a pass that changes a graph gives it another hash, and every file that was made before would be for another model.
Hence a pass says since which version of the import it is applied: `from_torch` is given the hashes that files name
(`made_for`), and where the graph of an earlier version has one of them, that graph is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hago.graph.graph import Graph
from hago.graph.passes import fold_batch_norms, fold_guards, open_attention
from hago.ops import OPS, Ops

__all__ = [
    "FOLDING",
    "PASSES",
    "Pass",
    "PassOptions",
    "apply_before_folding",
    "apply_from_folding",
    "fold_batch_norms",
    "fold_for",
    "fold_guards",
    "import_versions",
    "open_attention",
    "passes_after_folding",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """What passes are told beside the graph. Made by `from_torch` for one import.

    Args:
        ops: the operators of the hardware.
        opens_attention: whether attention is opened into products and a softmax.
        opens_shared_heads: whether attention with shared heads is, too.
        open_axes: by node, the axes whose size depends on the batch. Only for passes before `fold_batch_norms`:
            training applies the others to a graph alone.
    """

    ops: Ops
    opens_attention: bool = True
    opens_shared_heads: bool = True
    open_axes: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pass:
    """An entry of `PASSES`.

    Args:
        name: that of its file.
        apply: the pass.
        since: the version of the import that first applied it. A new pass takes one more than the largest so far.
    """

    name: str
    apply: Callable[[Graph, PassOptions], Graph]
    since: int


#: The pass up to which a graph has its batch norms; `from_torch(fold=False)` gives the graph before it, for training.
FOLDING: Final = "fold_batch_norms"
#: All passes, in the order in which they are applied.
PASSES: Final[tuple[Pass, ...]] = (
    Pass("fold_guards", lambda graph, o: fold_guards.fold_guards(graph, o.ops), since=2),
    Pass(
        "open_attention",
        lambda graph, o: (
            open_attention.open_attention(graph, o.open_axes, o.ops, shared_heads=o.opens_shared_heads)
            if o.opens_attention
            else graph
        ),
        since=2,
    ),
    Pass(FOLDING, lambda graph, o: fold_batch_norms.fold_batch_norms(graph), since=1),
)


def import_versions(made_for: Collection[str]) -> Sequence[int]:
    """The versions of the import to try, the newest last: all where files name hashes, else the newest alone."""
    newest = max(p.since for p in PASSES)
    return range(1 if made_for else newest, newest + 1)


def apply_before_folding(graph: Graph, options: PassOptions, version: int) -> Graph:
    """Apply the passes before `fold_batch_norms` that a version of the import has."""
    return _apply(graph, options, version, PASSES[: _folding()])


def apply_from_folding(graph: Graph, options: PassOptions, version: int) -> Graph:
    """Apply `fold_batch_norms`, and the passes after it, that a version of the import has."""
    return _apply(graph, options, version, PASSES[_folding() :])


def fold_for(graph: Graph, ops: Ops = OPS, made_for: Collection[str] = ()) -> Graph:
    """Fold a graph that `from_torch(fold=False)` gave, as `from_torch` does.

    Args:
        made_for: as `from_torch` was given.
    """
    options = PassOptions(ops=ops)
    for version in import_versions(made_for):
        folded = apply_from_folding(graph, options, version)
        if made_for and folded.model_hash in made_for:
            break
    return folded


def passes_after_folding() -> list[str]:
    """The names of the passes after `fold_batch_norms`, which batch norms in training do not see."""
    return [p.name for p in PASSES[_folding() + 1 :]]


def _folding() -> int:
    return [p.name for p in PASSES].index(FOLDING)


def _apply(graph: Graph, options: PassOptions, version: int, passes: Sequence[Pass]) -> Graph:
    for entry in passes:
        if entry.since <= version:
            graph = entry.apply(graph, options)
    return graph
