"""Data sets: batches from any iterable or file, checked once, read often, within a memory bound."""
