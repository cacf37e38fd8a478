"""Export to ONNX in QDQ or QOperator form, and the comparison of exported files with the integer model."""
