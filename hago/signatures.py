"""Signatures at a node: which groups of bits decide what it reads and writes, and what its signatures take of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Final

from hago.graph import CONST, OUTPUT, Node
from hago.hardware import OpDesc
from hago.ops._integer import IntegerForm
from hago.resolve import Resolver
from hago.space import Group
from hago.topology import fitting_descs, weight_only_descs
from hago.types import DType, Edge

#: Mixtures of dtypes that a node may be given, of which each is looked at.
_MIXED: Final = 256


def feeding(resolver: Resolver, edge: Edge) -> str | None:
    """The group whose bits arrive on an edge, past nodes that hand values on; None where there is none."""
    graph = resolver.graph
    while True:
        key = resolver.group_of.get(edge)
        if key is not None:
            return key
        source = graph[graph.source(edge)]
        if f"{source.name}:out" in resolver.space.groups:
            return f"{source.name}:out"
        if source.op == CONST or not source.inputs or not resolver.topology.nodes[source.name]:
            return None
        edge = source.edges[0]


def groups_at(resolver: Resolver, name: str) -> list[str]:
    """The groups that decide in which dtypes a node reads and writes."""
    if name == OUTPUT:
        return []
    node, topology = resolver.graph[name], resolver.topology
    if not topology.nodes[name]:
        return [str(e) for e in node.edges if topology.edges[e]]
    own = f"{name}:out"
    keys = [feeding(resolver, e) for e in node.edges]
    return list(dict.fromkeys([*(k for k in keys if k), *([own] if own in resolver.space.groups else [])]))


def most_bits(resolver: Resolver, name: str, desc: OpDesc) -> dict[str, int]:
    """How many bits a signature of an integer node can take at most, for each of the groups at it."""
    node, most = resolver.graph[name], dict[str, int]()
    form = resolver.ops[node.op].integer
    for edge in node.edges:
        key = feeding(resolver, edge)
        if key is not None and (key == str(edge) or form is None or form.slot(edge.slot) in ("own", "follow")):
            most[key] = min(most.get(key, desc.in_dtype(edge.slot).bits), desc.in_dtype(edge.slot).bits)
    own = f"{name}:out"
    if own in resolver.space.groups and desc.fixed_out is None:
        most[own] = min(most.get(own, desc.out_dtype.bits), desc.out_dtype.bits)
    return most


def descs_at(resolver: Resolver, name: str) -> tuple[OpDesc, ...]:
    """The signatures that a node may take as it is: in integers, or in float with its weight as integers."""
    descs = fitting_descs if resolver.topology.nodes[name] else weight_only_descs
    return descs(resolver.graph, resolver.graph[name], resolver.hardware, resolver.ops)


def classes(resolver: Resolver, group: Group) -> list[tuple[int, ...]]:
    """A group's choices, cut where they need another dtype."""
    widths: set[int] = set()
    for edge in group.edges:
        if edge.dst != OUTPUT:
            widths |= {d.in_dtype(edge.slot).bits for d in descs_at(resolver, edge.dst)}
    node, _, slot = group.key.rpartition(":")
    if slot == "out":
        widths |= {d.out_dtype.bits for d in descs_at(resolver, node)}
    found: dict[int, list[int]] = {}
    for bits in group.choices:
        found.setdefault(sum(w >= bits for w in widths), []).append(bits)
    return [tuple(c) for c in found.values()]


# ---------------------------------------------------------------- whether anything can be refused
def may_refuse(resolver: Resolver) -> bool:
    """Whether some point may fit no signature. It is judged by signatures alone, so there may be none where it says so;
    where it says no there is none."""
    return any(not _takes_all(resolver, node) for node in resolver.graph if resolver.topology.nodes[node.name])


def _takes_all(resolver: Resolver, node: Node) -> bool:
    """Whether whatever an integer node may be given is held by some signature that takes all bits."""
    form = resolver.ops[node.op].integer
    assert form is not None
    wide = [d for d in descs_at(resolver, node.name) if _takes_all_bits(resolver, node, d)]
    given = _given(resolver, node, form)
    every = [{slot: dtype} for slot, dtypes in given.items() for dtype in dtypes]
    if any(all(_takes(d, form, one) for one in every) for d in wide):
        return True  # however many operands there are: slots are looked at one by one
    if math.prod(map(len, given.values())) > _MIXED:
        return False
    mixtures = (dict(zip(given, dtypes, strict=True)) for dtypes in itertools.product(*given.values()))
    return all(any(_takes(d, form, mixture) for d in wide) for mixture in mixtures)


def _takes(desc: OpDesc, form: IntegerForm, given: Mapping[int, DType]) -> bool:
    """Whether a signature takes operands in these dtypes, by slot; see `Operands.holds`."""
    for slot, dtype in given.items():
        own = desc.in_dtype(slot)
        if form.slot(slot) == "common":
            if desc.requantize_at == "edge" and own.bits != dtype.bits:
                return False
        elif not (own.min <= dtype.min and dtype.max <= own.max):
            return False
    return True


def _takes_all_bits(resolver: Resolver, node: Node, desc: OpDesc) -> bool:
    groups = resolver.space.groups
    own = [(groups[str(e)], desc.in_dtype(e.slot)) for e in node.edges if str(e) in groups]
    if desc.fixed_out is None and f"{node.name}:out" in groups:
        own.append((groups[f"{node.name}:out"], desc.out_dtype))
    return all(group.choices[0] <= dtype.bits for group, dtype in own)


def _given(resolver: Resolver, node: Node, form: IntegerForm) -> dict[int, set[DType]]:
    """By slot, the dtypes in which integers without bits of their own may come."""
    found = {}
    for edge in node.edges:
        source = resolver.graph.source(edge)
        alone = str(edge) not in resolver.space.groups and form.slot(edge.slot) not in ("bias", "plain")
        if alone and resolver.topology.nodes.get(source):
            found[edge.slot] = {d.out_dtype for d in descs_at(resolver, source)}
    return found
