"""Export of Plans to files that other tools read: ONNX models, and the tables of TPU-MLIR's compiler."""

from hago.export import onnx
from hago.export.formats import (
    FORMATS,
    ExportFormat,
    ExportResult,
    check_files,
    find_format,
    request_export,
    write_files,
)

__all__ = [
    "FORMATS",
    "ExportFormat",
    "ExportResult",
    "check_files",
    "find_format",
    "onnx",
    "request_export",
    "write_files",
]
