"""Export to ONNX in QDQ or QOperator form, and the comparison of exported files with the integer model."""

from hago.export.onnx.builder import OnnxFile
from hago.export.onnx.engines import ENGINES, SATURATES, ObservedModel, openvino_if_no_crash, saturates_pairs
from hago.export.onnx.export import make_onnx, write_onnx
from hago.export.onnx.verification import OnnxCheck, PlaceCheck, check_onnx, count_differences

__all__ = [
    "ENGINES",
    "SATURATES",
    "ObservedModel",
    "OnnxCheck",
    "OnnxFile",
    "PlaceCheck",
    "check_onnx",
    "count_differences",
    "make_onnx",
    "openvino_if_no_crash",
    "saturates_pairs",
    "write_onnx",
]
