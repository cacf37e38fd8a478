"""The strategy: the result of a search as a JSON file, which can be applied and replayed.

A strategy holds the data that cannot be derived: bits, resolved thresholds, and the model and hardware that it was made
for. Scales and dtypes are not stored: a Resolver derives them. `search.session` makes and saves strategies;
`hago.create_quantizer` applies them, and `hago.replay` evaluates them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from hago.arithmetic.types import Edge
from hago.correction import Corrections
from hago.errors import HASH_DIGITS, OTHER_CONTENT, OTHER_MODEL, HagoError, LogError, StrategyMismatch, did_you_mean
from hago.serialization.file_kind import STRATEGY, told_from_other_kinds
from hago.serialization.json_text import (
    canonical,
    check_schema,
    check_version,
    json_values,
    parse_json,
    read_file,
    replace_file,
)
from hago.serialization.summary import Summarized, Summary, bits_text, figures_text, names_text, number_values
from hago.serialization.text_table import bytes_text, counted

STRATEGY_VERSION: Final = 1

#: One end of a range, in real units: a number, or one per channel.
Bound: TypeAlias = float | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HardwareId:
    """A piece of hardware: its name, and the hash of its description."""

    name: str
    hash: str

    def unlike(self, name: str, hashed: str) -> str:
        """This hardware and the other one that was given in its place, in words."""
        cause = f", so it is {OTHER_CONTENT}" if name == self.name else ""
        return (
            f"hardware {self.name!r} with hash {self.hash[:HASH_DIGITS]}, this is {name!r} with "
            f"{hashed[:HASH_DIGITS]}{cause}"
        )


@dataclass(frozen=True, slots=True)
class Conditions:
    """Which nodes run in integers, and which edges (`"add:1"`) are quantized."""

    node_conds: Mapping[str, bool]
    edge_conds: Mapping[str, bool]


@dataclass(frozen=True, slots=True, repr=False)
class Strategy(Summarized):
    """Bits and thresholds for one model on one piece of hardware.

    Args:
        model_hash: of the Graph the strategy is for.
        hardware: the hardware that it is for.
        topology: which nodes and edges are quantized.
        bits: by group: an edge (`"layer1.0.add:1"`) or all out-edges of a node (`"conv1:out"`).
        thresholds: by edge or group, (low, high) in real units, each a number or one per channel.
        made_by: how it was found, JSON values only: searcher, estimator, objective, score, etc.
        corrections: what is changed in the model before it is quantized.
        version: of the format.

    Raises:
        LogError: a part that contradicts another, named by its JSON path.
    """

    model_hash: str
    hardware: HardwareId
    topology: Conditions
    bits: Mapping[str, int]
    thresholds: Mapping[str, tuple[Bound, Bound]]
    made_by: Mapping[str, Any] = field(default_factory=dict)
    corrections: Corrections = field(default_factory=Corrections)
    version: int = STRATEGY_VERSION

    def __post_init__(self) -> None:
        for key, bits in self.bits.items():
            self._check_key("bits", key)
            if self.topology.edge_conds.get(key, True) is False:
                raise LogError(f"at $.bits[{key!r}]: got bits for an edge that edge_conds keeps float")
            if not 1 <= bits <= 64:
                raise LogError(f"at $.bits[{key!r}]: got {bits}, expected 1 to 64 bits")
        for key in self.topology.edge_conds:
            self._check_edge(key)
        ranges = {}
        for key, (low, high) in self.thresholds.items():
            self._check_key("thresholds", key)
            ranges[key] = _range(key, low, high)
        object.__setattr__(self, "bits", {k: int(b) for k, b in self.bits.items()})
        object.__setattr__(self, "thresholds", ranges)
        object.__setattr__(self, "made_by", json_values(self.made_by, "$.made_by"))

    def _check_key(self, part: str, key: str) -> None:
        node, colon, slot = key.rpartition(":")
        is_group = bool(colon) and slot == "out" and node in self.topology.node_conds
        if key not in self.topology.edge_conds and not is_group:
            known = [*self.topology.edge_conds, *(f"{n}:out" for n in self.topology.node_conds)]
            raise LogError(
                f"at $.{part}[{key!r}]: got a key that names neither an edge of edge_conds nor the "
                f"out-edges of a node.{did_you_mean(key, known)}"
            )

    def _check_edge(self, key: str) -> None:
        where = f"at $.topology.edge_conds[{key!r}]"
        try:
            node = Edge.parse(key).dst
        except HagoError as error:
            raise LogError(f"{where}: {error}") from None
        if node not in self.topology.node_conds:
            raise LogError(
                f"{where}: node {node!r} is not in node_conds.{did_you_mean(node, self.topology.node_conds)}"
            )

    def check_against(self, model_hash: str, hardware_name: str, hardware_hash: str) -> None:
        """Check that the strategy was made for this model and hardware.

        Raises:
            StrategyMismatch: it was not; names both hashes.
        """
        if model_hash != self.model_hash:
            raise StrategyMismatch(
                f"the strategy was made for the model with hash {self.model_hash[:HASH_DIGITS]}, this one has "
                f"{model_hash[:HASH_DIGITS]}, so it is {OTHER_MODEL}; "
                "load the model and weights it was made for, or search again"
            )
        if hardware_hash != self.hardware.hash:
            raise StrategyMismatch(
                f"the strategy was made for {self.hardware.unlike(hardware_name, hardware_hash)}; "
                "use that description, or search again"
            )

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` gives the same strategy back."""
        return {
            "version": self.version,
            "model_hash": self.model_hash,
            "hardware": {"name": self.hardware.name, "hash": self.hardware.hash},
            "topology": {
                "node_conds": dict(self.topology.node_conds),
                "edge_conds": dict(self.topology.edge_conds),
            },
            "bits": dict(self.bits),
            "thresholds": {k: json_values(v, "$.thresholds") for k, v in self.thresholds.items()},
            "made_by": dict(self.made_by),
            **({"corrections": self.corrections.to_json()} if self.corrections else {}),
        }

    @staticmethod
    def from_json(value: Any, where: str = "strategy") -> Strategy:
        """The strategy that JSON values describe.

        Raises:
            LogError: what is malformed or contradicts itself, with its JSON path.
        """
        check_version(value, STRATEGY_VERSION, where)
        check_schema(value, "strategy", where)
        topology = value["topology"]
        try:
            return Strategy(
                value["model_hash"],
                HardwareId(**value["hardware"]),
                Conditions(topology["node_conds"], topology["edge_conds"]),
                value["bits"],
                value["thresholds"],
                value["made_by"],
                Corrections.from_json(value.get("corrections", {})),
            )
        except LogError as error:
            raise LogError(f"{where}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the strategy as a JSON file, which is replaced atomically.

        Raises:
            LogError: it could not be written; an older file is unchanged.
        """
        replace_file(Path(path), canonical(self.to_json()) + "\n")

    @staticmethod
    def load(path: str | Path) -> Strategy:
        """Read a strategy.

        Raises:
            LogError: unreadable, not JSON, malformed, or contradicting itself.
        """
        try:
            data = read_file(path)
            text = data.decode("utf-8")
        except (OSError, ValueError) as error:
            raise LogError(f"cannot read strategy {path}: {error}") from None
        with told_from_other_kinds(data, str(path), STRATEGY):
            return Strategy.from_json(parse_json(text, str(path)), str(path))

    def summary(self) -> Summary:
        """The bits, the measures and costs that were recorded, what stays float, and how it was made."""
        made_by, nodes, computed = self.made_by, self.topology.node_conds, self._computed
        searcher = made_by.get("searcher")
        how = {
            "searcher": searcher.get("name") if isinstance(searcher, Mapping) else None,
            "thresholds": made_by.get("estimator"),
        }
        start = ", ".join(f"{name} {value}" for name, value in how.items() if value)
        trained = made_by.get("trained")
        scheme = trained.get("scheme") if isinstance(trained, Mapping) else None
        size = number_values(made_by.get("costs")).get("weight_bytes")
        return Summary(
            f"Strategy for {self._subject}",
            {
                "bits": bits_text(self.bits.values(), "groups of edges"),
                "corrected": str(self.corrections),
                "weights": "" if size is None else f"{bytes_text(size)} at their bits",
                "score": figures_text(made_by.get("results")),
                "held out": figures_text(made_by.get("held_out")),
                "float": names_text([name for name in computed if not nodes[name]]) or "nothing",
                "made by": f"training with scheme {scheme}, from {start or 'a strategy'}" if scheme else start,
            },
        )

    @property
    def _computed(self) -> list[str]:
        """The nodes that are computed: inputs and constants have no in-edges."""
        return [name for name in self.topology.node_conds if f"{name}:0" in self.topology.edge_conds]

    @property
    def _subject(self) -> str:
        """The hardware and the network in words."""
        nodes = counted(len(self._computed), "node")
        return f"{self.hardware.name} and a network of {nodes} (hash {self.model_hash[:12]})"

    def __str__(self) -> str:
        head = f"strategy for {self._subject}"
        width = max(map(len, self.bits), default=0)
        return "\n".join([head, *(f"  {k:<{width}}  {b:>2} bits" for k, b in self.bits.items())])


def _range(key: str, low: Any, high: Any) -> tuple[Bound, Bound]:
    ends = []
    for slot, end in enumerate((low, high)):
        listed = list(end) if isinstance(end, Sequence) else [end]
        for number in listed:
            if not math.isfinite(number):
                raise LogError(f"at $.thresholds[{key!r}][{slot}]: got {number}, expected a finite number")
        ends.append([float(n) for n in listed])
    if isinstance(low, Sequence) != isinstance(high, Sequence) or len(ends[0]) != len(ends[1]):
        raise LogError(f"at $.thresholds[{key!r}]: got ends of {len(ends[0])} and {len(ends[1])} channels")
    for a, b in zip(*ends, strict=True):
        if a > b:
            raise LogError(f"at $.thresholds[{key!r}]: got [{a!r}, {b!r}], expected low <= high")
    return (tuple(ends[0]), tuple(ends[1])) if isinstance(low, Sequence) else (ends[0][0], ends[1][0])
