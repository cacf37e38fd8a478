"""FastModel: the integer model on the fast kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from hago.engine.executor import Executor
from hago.engine.report import KernelTable
from hago.errors import HagoError, did_you_mean
from hago.graph import Node
from hago.realization import IntegerModel
from hago.types import Edge


class FastModel(IntegerModel):
    """An integer model whose forward runs on the fastest kernels that are exact on this machine.

    Its outputs are those of the reference engine bit for bit. The kernels are chosen where it runs: a copy in
    another process, or one that was saved and loaded, chooses its own.
    """

    @functools.cached_property
    def executor(self) -> Executor:
        """The steps, made when first needed."""
        return Executor(self.plan)

    def run(
        self,
        inputs: Sequence[Tensor],
        on_value: Callable[[Node, Any], None] | None = None,
        on_edge: Callable[[Edge, Any], None] | None = None,
    ) -> list[Any]:
        """The outputs of flat inputs. With `on_value` (every node's stored integers) or `on_edge` (the centered
        integers that arrive at integer nodes) the reference engine runs, where all of them exist; so it does under
        torch.export."""
        if on_value is not None or on_edge is not None or torch.compiler.is_exporting():
            return super().run(inputs, on_value, on_edge)
        return self.executor.run(inputs)

    def explain(self) -> KernelTable:
        """Node by node, which kernel runs it and why."""
        return self.executor.explain()


#: By name: the fastest kernels that are exact on this machine, and int64 throughout.
ENGINES: Final[dict[str, type[IntegerModel]]] = {"auto": FastModel, "reference": IntegerModel}


def named_engine(name: str) -> type[IntegerModel]:
    """The integer model that runs on an engine.

    Raises:
        HagoError: there is none of that name.
    """
    if name not in ENGINES:
        raise HagoError(f"unknown engine {name!r}; expected {' or '.join(ENGINES)}." + did_you_mean(name, ENGINES))
    return ENGINES[name]
