"""Data sets: batches from any iterable or file, checked once, read often, within a memory bound."""

from hago.data.batches import Batch, Batches
from hago.data.sources import load_data

__all__ = [
    "Batch",
    "Batches",
    "load_data",
]
