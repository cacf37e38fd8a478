"""TPU-MLIR: its integer operators, calibration, tables and fake quantization, as its compiler computes them."""
