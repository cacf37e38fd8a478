"""The corrections of a network, as a strategy and a log hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hago.correction.absorption import Shifts, absorbed
from hago.correction.equalization import equalized
from hago.correction.offsets import OffsetConstants
from hago.correction.rotation import rotated
from hago.correction.splitting import Splits
from hago.graph import Graph
from hago.ops import OPS, Ops
from hago.serialization.text_table import counted


@dataclass(frozen=True, slots=True)
class Corrections:
    """What is changed in a network before it is quantized.

    Args:
        equalization: by node, for each channel of its value the exponent of the factor that divides it, in sixteenths;
            see `hago.correction.equalization`.
        splits: the nodes that are computed in parts or once more, before channels are divided; see
            `hago.correction.splitting`.
        clamps: the clamps that have a limit for each channel, divided as the channel is.
        absorption: by node, what is taken from the channels of its value once these are divided, and absorbed by the
            biases behind it; see `hago.correction.absorption`.
        offsets: by constant, by how much its integers differ from the nearest; see `hago.correction.offsets`.
        rotations: by node whose channels are rotated, and those of others with it, the seed of the rotation, before
            anything is split; see `hago.correction.rotation`.
    """

    equalization: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    offsets: Mapping[str, str] = field(default_factory=dict)
    splits: Splits = field(default_factory=Splits)
    absorption: Mapping[str, Shifts] = field(default_factory=dict)
    clamps: tuple[str, ...] = ()
    rotations: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.of_graph or self.offsets)

    @property
    def of_graph(self) -> bool:
        """Whether they change the graph, and not only the integers of its constants."""
        return bool(self.rotations or self.splits or self.equalization or self.absorption)

    def __str__(self) -> str:
        parts = []
        if self.rotations:
            parts.append(f"channels of {counted(len(self.rotations), 'group')} of values rotated")
        if self.splits.norms:
            parts.append(f"{counted(len(self.splits.norms), 'norm')} computed once more for layers")
        if self.splits.channels:
            parts.append(f"channels of {counted(len(self.splits.channels), 'layer')} computed in parts")
        if self.equalization:
            parts.append(f"channels of {counted(len(self.equalization), 'layer')} equalized")
        if self.clamps:
            parts.append(f"{counted(len(self.clamps), 'clamp')} with a limit for each channel")
        if self.absorption:
            parts.append(f"channels of {counted(len(self.absorption), 'layer')} shifted")
        if self.offsets:
            parts.append(f"integers of {counted(len(self.offsets), 'constant')} rounded or moved for the outputs")
        return ", ".join(parts)

    def apply(self, graph: Graph, ops: Ops = OPS) -> Graph:
        """The corrected network; the graph itself where there is nothing to correct.

        Args:
            graph: the network that they were found for, or one that they were applied to.

        Raises:
            LogError: they do not fit the graph.
        """
        changed = graph.uncorrected
        if self.rotations:
            changed = rotated(changed, self.rotations, ops)
        changed = self.splits.apply(changed)
        if self.equalization:
            changed = equalized(changed, self.equalization, self.clamps, ops)
        return absorbed(changed, self.absorption, ops) if self.absorption else changed

    def constants(self, graph: Graph, rounding: str) -> OffsetConstants | None:
        """The integers of the corrected network's constants, for a Resolver; None where all are the nearest.

        Args:
            graph: the corrected network.
            rounding: of the hardware.

        Raises:
            LogError: offsets do not fit the graph.
        """
        return OffsetConstants.stored(graph, self.offsets, rounding) if self.offsets else None

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` gives the same corrections back."""
        factors = {n: list(of) for n, of in self.equalization.items()}
        parts: dict[str, Any] = {
            "rotations": dict(self.rotations),
            "splits": self.splits.to_json(),
            "equalization": factors,
            "clamps": list(self.clamps),
            "absorption": {name: shifts.to_json() for name, shifts in self.absorption.items()},
            "offsets": dict(self.offsets),
        }
        return {name: part for name, part in parts.items() if part}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Corrections:
        """The corrections that JSON values, checked by the schema, describe."""
        return Corrections(
            equalization={n: tuple(of) for n, of in value.get("equalization", {}).items()},
            offsets=dict(value.get("offsets", {})),
            splits=Splits.from_json(value.get("splits", {})),
            absorption={name: Shifts.from_json(of) for name, of in value.get("absorption", {}).items()},
            clamps=tuple(value.get("clamps", ())),
            rotations=dict(value.get("rotations", {})),
        )
