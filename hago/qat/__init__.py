"""Training with the Plan in the forward pass: fake quantization, ranges, schemes, fine-tuning."""
