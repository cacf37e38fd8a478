"""Garbage collection: a pause of Python's cyclic collector while very many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's collector of cyclic garbage while the context is open; no effect if it is off already.

    An import of torch's exporter makes a million objects that stay. The collector would go through all of them several
    times, which takes longer than a third of the import. Afterwards they count as old, so that the next collection of
    young objects does not go through them either; garbage among them is freed by the next full collection.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # objects that the user froze stay frozen
            gc.freeze()
            gc.unfreeze()  # moves all objects into the oldest generation
        gc.enable()
