"""Export of Plans to files that other tools read: ONNX models, and the tables of TPU-MLIR's compiler."""
