"""The fast integer engine: a Plan on the integer kernels that are exact on this machine."""
