"""Training with the Plan in the forward pass, and what a strategy gains by it."""
