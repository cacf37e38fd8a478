"""RelativeAdam: Adam with steps relative to the size of the parameters.

Weights that batch norms were folded into differ in size by orders of magnitude from channel to channel. One absolute
learning rate would be too large for some channels and too small for others. `hago.qat.run.TrainingRun` uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

#: The decay rates of the averages of the gradient and of its square.
_MEAN_DECAY: Final = 0.9
_SQUARE_DECAY: Final = 0.999
#: Added to the root of the average squares, relative to the largest root of the parameter.
_EPS: Final = 1e-8


class RelativeAdam(torch.optim.Optimizer):
    """Adam with step `lr * size * mean / (sqrt(square) + eps)`, both averages bias-corrected.

    Args:
        parameters: pairs of a parameter and its size, a tensor that broadcasts against it.
        lr: relative learning rate; a step changes a value by about `lr` times its size.

    References:
        Kingma and Ba, arXiv:1412.6980; relative steps as in Shazeer and Stern, arXiv:1804.04235.
    """

    def __init__(self, parameters: Iterable[tuple[nn.Parameter, Tensor]], lr: float) -> None:
        groups: list[dict[str, Any]] = [{"params": [p], "size": s.to(p.dtype)} for p, s in parameters]
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients of the parameters; `closure` is not called."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"], state["mean"], state["square"] = 0, torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        mean, square = state["mean"], state["square"]
        mean.lerp_(grad, 1 - _MEAN_DECAY)
        square.mul_(_SQUARE_DECAY).addcmul_(grad, grad, value=1 - _SQUARE_DECAY)
        root = square.sqrt()
        root.div_((1 - _SQUARE_DECAY ** state["step"]) ** 0.5).add_(root.amax() * _EPS + 1e-30)
        p.addcdiv_(mean * group["size"], root, value=-group["lr"] / (1 - _MEAN_DECAY ** state["step"]))


def channel_sizes(value: Tensor, axis: int | None) -> Tensor:
    """The root mean square of every channel along `axis`, at least a hundredth of that of the whole tensor.

    Args:
        value: the value of a parameter, not empty.
        axis: of the channels; None for one size of the whole tensor.

    Returns:
        A tensor that broadcasts against `value`; 1 where all values are 0.
    """
    overall = value.square().mean().sqrt()
    if axis is None or value.ndim < 2:
        size = overall
    else:
        size = value.square().mean([d for d in range(value.ndim) if d != axis % value.ndim], keepdim=True).sqrt()
    size = torch.maximum(size, overall * 0.01)
    return torch.where(size > 0, size, torch.ones_like(size))


def optimizer_tensors(optimizer: RelativeAdam, names: Sequence[str]) -> dict[str, Tensor]:
    """The state of the optimizer as tensors for a checkpoint: by parameter, its averages and number of steps."""
    tensors: dict[str, Tensor] = {}
    for name, group in zip(names, optimizer.param_groups, strict=True):
        state = optimizer.state[group["params"][0]]
        if state:
            tensors[f"{name}/mean"], tensors[f"{name}/square"] = state["mean"], state["square"]
            tensors[f"{name}/step"] = torch.tensor(state["step"])
    return tensors


def load_optimizer(optimizer: RelativeAdam, names: Sequence[str], tensors: dict[str, Tensor]) -> None:
    """Restore the state that `optimizer_tensors` returned."""
    for name, group in zip(names, optimizer.param_groups, strict=True):
        parameter = group["params"][0]
        if f"{name}/step" in tensors:
            state = optimizer.state[parameter]
            state["step"] = int(tensors[f"{name}/step"])
            for part in ("mean", "square"):
                state[part] = torch.empty_like(parameter).copy_(tensors[f"{name}/{part}"])
