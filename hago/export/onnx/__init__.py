"""ONNX files in QDQ and in QOperator form, and their check in the engines that run them."""
