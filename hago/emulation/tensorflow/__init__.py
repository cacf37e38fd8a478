"""TensorFlow: its fake quantization, its training layers, and contrib.quantize's rewriting of graphs."""
