"""The arithmetic and the quantizers of other systems, bit for bit, on tensors; one module or package a system."""
