"""The integer model on the fastest kernels that are exact on this machine."""
