"""Training with quantization: the quantizers of OneFlow, TensorFlow, DoReFa-Net and PyTorch as values.

Each is a small function or frozen dataclass that does, to the bit, what the original does; its
gradient is the original's. docs/quantizers.md has the differences side by side.
"""
