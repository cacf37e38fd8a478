"""What a Plan takes on its hardware: bytes, cycles, latency, energy."""
