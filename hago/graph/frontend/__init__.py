"""From an nn.Module or an ExportedProgram to a Graph: all of hago that reads torch.export and torch.fx."""

from hago.graph.frontend.exported_program import Attention, ModelLike, check_finite, from_torch

__all__ = ["Attention", "ModelLike", "check_finite", "from_torch"]
