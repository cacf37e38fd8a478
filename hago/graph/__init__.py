"""The network: nodes and edges, import from torch.export, passes over it, and running it in float."""

from hago.graph import passes, schedule
from hago.graph.execute import (
    autocast_off,
    channels_last,
    check_batches,
    check_inputs,
    compute_laid_out,
    compute_real,
    example_inputs,
    flatten_inputs,
    infer_dtypes,
    infer_shape,
    laid_out,
    nest_outputs,
    nesting_of,
    over_samples,
    run_graph,
    run_real,
    run_without_values,
    takes_any_batch,
)
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
from hago.graph.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.graph.nesting import read_tree

__all__ = [
    "CONST",
    "INPUT",
    "OUTPUT",
    "Attention",
    "ExampleInputs",
    "Graph",
    "ModelLike",
    "Node",
    "as_arguments",
    "autocast_off",
    "channels_last",
    "check_batches",
    "check_export",
    "check_exportable",
    "check_finite",
    "check_inputs",
    "check_runs",
    "compute_laid_out",
    "compute_real",
    "example_inputs",
    "flatten_inputs",
    "from_torch",
    "infer_dtypes",
    "infer_shape",
    "laid_out",
    "model_source",
    "nest_outputs",
    "nesting_of",
    "over_samples",
    "passes",
    "read_tree",
    "run_graph",
    "run_real",
    "run_without_values",
    "schedule",
    "takes_any_batch",
    "warn_of_scale",
]
