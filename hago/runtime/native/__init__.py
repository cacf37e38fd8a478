"""The integer model on the fastest kernels that are exact on this machine: selection, lowering, code and execution."""
