"""From an nn.Module or an ExportedProgram to a Graph: all of hago that reads torch.export and torch.fx."""

from hago.graph.frontend.export_check import check_export
from hago.graph.frontend.exported_program import (
    Attention,
    ExampleInputs,
    ModelLike,
    as_arguments,
    check_exportable,
    check_finite,
    from_torch,
)
from hago.graph.frontend.input_diagnosis import check_runs
from hago.graph.frontend.input_scale import warn_of_scale

__all__ = [
    "Attention",
    "ExampleInputs",
    "ModelLike",
    "as_arguments",
    "check_export",
    "check_exportable",
    "check_finite",
    "check_runs",
    "from_torch",
    "warn_of_scale",
]
