"""Storages of Optuna's studies: opened by URL, with what goes wrong in them as one line.

A storage may be far away, and what it raises is its driver's own. Passwords are neither logged nor shown.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

from hago.errors import HagoError

#: Seconds to wait for a database server, unless the URL says `connect_timeout`.
PATIENCE: Final = 15


def open_storage(url: str) -> Any:
    """Optuna's storage for a URL: `sqlite:///FILE`, `postgresql://...`, `journal:FILE`; None for memory."""
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if url.startswith("journal:"):
        return JournalStorage(JournalFileBackend(url.removeprefix("journal:")))
    return _retried(lambda: RDBStorage(full(url))) if url else None


def _retried(make: Callable[[], Any]) -> Any:
    """What `make` makes; of processes that open a new database at the same time, all but one may find that its
    tables have come into being while they were making them."""
    from sqlalchemy.exc import DBAPIError

    for wait in (0.1, 0.3, 1.0, 3.0):
        try:
            return make()
        except DBAPIError as error:
            if "already exists" not in str(error):
                raise
            time.sleep(wait)
    return make()


def close_storage(storage: Any) -> None:
    """Give back what an opened storage holds: a database's connections."""
    engine = getattr(storage, "engine", None)
    if engine is not None:
        storage.remove_session()
        engine.dispose()


def full(url: str) -> str:
    """A database's URL with what is left to chance where it is not said: the driver, and how long to wait."""
    scheme, found, rest = url.partition("://")
    if not found or not scheme.startswith("postgres"):
        return url
    if scheme in ("postgres", "postgresql"):
        # SQLAlchemy's own choice changes with its version
        has_old = importlib.util.find_spec("psycopg") is None and importlib.util.find_spec("psycopg2") is not None
        scheme = "postgresql+psycopg2" if has_old else "postgresql+psycopg"
    if "connect_timeout=" not in rest:
        rest += f"{'&' if '?' in rest else '?'}connect_timeout={PATIENCE}"
    return f"{scheme}://{rest}"


def hidden(url: str) -> str:
    """A URL without its password."""
    return re.sub(r"(://[^/@:]*):.*@", r"\1:***@", url)


@contextlib.contextmanager
def speaking(url: str, doing: str) -> Iterator[None]:
    """While this lasts, Optuna's notes on new studies and experimental parts are not shown, and what a storage
    raises becomes one line.

    Raises:
        HagoError: the storage cannot be reached, or refuses, or a package that it needs is missing.
    """
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except HagoError:
        raise
    except ImportError as error:
        extra = "; pip install 'hago[postgres]'" if "psycopg" in str(error) else ""
        raise HagoError(f"storage {hidden(url)!r} needs a package: {error}{extra}") from None
    except Exception as error:  # whatever the storage's driver raises
        if not url:
            raise
        root = error.__cause__ or error.__context__ or error
        said = next(iter(str(root).strip().splitlines()), type(root).__name__)
        raise HagoError(
            f"cannot {doing} storage {hidden(url)!r}: {said}; a log of the search holds all that was evaluated"
        ) from None
    finally:
        logger.setLevel(level)
