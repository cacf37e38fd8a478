"""Export of Plans to files that other tools read: ONNX models, the tables of TPU-MLIR's compiler, and graphs for
Model Explorer."""

from hago.export import onnx
from hago.export.formats import (
    FORMATS,
    ExportFormat,
    ExportResult,
    NodeFigures,
    check_files,
    find_format,
    request_export,
    write_files,
)

__all__ = [
    "FORMATS",
    "ExportFormat",
    "ExportResult",
    "NodeFigures",
    "check_files",
    "find_format",
    "onnx",
    "request_export",
    "write_files",
]
