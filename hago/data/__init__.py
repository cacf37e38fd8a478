"""Data sets: batches from any iterable or file, checked once and read many times, in bounded memory."""

from hago.data.batches import Batch, Batches
from hago.data.sources import load_data

__all__ = [
    "Batch",
    "Batches",
    "load_data",
]
