"""Data sets: batches from any iterable or file, checked once and read many times, in bounded memory; and
the progress of jobs that read them."""

from hago.data import named_objects
from hago.data.batches import (
    BATCH_SIZE,
    CACHE_BYTES,
    CALIBRATION_DATA,
    HELD_OUT_DATA,
    Batch,
    Batches,
    OnBatch,
    are_whole,
    as_tensor,
    spread_indices,
)
from hago.data.plausibility import warn_if_implausible, warn_if_shared
from hago.data.progress import JobProgress, StatusLine, duration
from hago.data.sources import EXPECTED_DATA, ImageShape, load_data

__all__ = [
    "BATCH_SIZE",
    "CACHE_BYTES",
    "CALIBRATION_DATA",
    "EXPECTED_DATA",
    "HELD_OUT_DATA",
    "Batch",
    "Batches",
    "ImageShape",
    "JobProgress",
    "OnBatch",
    "StatusLine",
    "are_whole",
    "as_tensor",
    "duration",
    "load_data",
    "named_objects",
    "spread_indices",
    "warn_if_implausible",
    "warn_if_shared",
]
