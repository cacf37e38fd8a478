"""The exact arithmetic of other quantization engines, as pure functions on integer tensors.

`gemmlowp`, `tflite` and the `tpu_mlir` modules each compute what their engine computes, to the last
integer; tests/golden holds values that the engines gave. Nothing here is used by hago's own
simulator: these functions say what a chip that runs one of those engines would answer.
"""
