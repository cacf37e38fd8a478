"""Data sets: batches from any iterable or file, checked once and read many times, in bounded memory."""

from hago.data import named_objects
from hago.data.batches import BATCH_SIZE, CACHE_BYTES, Batch, Batches, are_whole, as_tensor
from hago.data.sources import EXPECTED_DATA, ImageShape, load_data

__all__ = [
    "BATCH_SIZE",
    "CACHE_BYTES",
    "EXPECTED_DATA",
    "Batch",
    "Batches",
    "ImageShape",
    "are_whole",
    "as_tensor",
    "load_data",
    "named_objects",
]
