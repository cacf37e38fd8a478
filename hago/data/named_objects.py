"""Objects that the user names on the command line, as `package.module:name`.

Only what the user typed is imported; nothing that a file holds ever comes here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hago.errors import HagoError, did_you_mean


def import_object(spec: str, what: str) -> Any:
    """The object that `package.module:name` names.

    Args:
        what: what it is for, in words; errors begin with it.

    Raises:
        HagoError: the text has another form, or there is no such module or name, or importing failed.
    """
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise HagoError(f"{what} {spec!r}: expected 'package.module:callable', e.g. 'my_models:resnet20'")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise HagoError(f"{what} {spec!r}: {_why_not_imported(module_name, error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            known = [n for n in dir(found) if not n.startswith("_")]
            raise HagoError(f"{what} {spec!r}: {module_name} has no {part!r}.{did_you_mean(part, known)}")
        found = getattr(found, part)
    return found


def _why_not_imported(module: str, error: Exception) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and (module == missing or module.startswith(missing + ".")):
        return f"there is no module {missing!r}; run in the folder that holds it, or install it"
    return f"importing {module} raised {one_line(error)}"


def one_line(error: BaseException) -> str:
    """An exception that someone else's code raised, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return type(error).__name__ + (f": {lines[0]}" if lines else "")


def call_named(function: Callable[[], Any], spec: str, what: str) -> Any:
    """What the named callable returns.

    Raises:
        HagoError: it is not callable without arguments, or raised.
    """
    if not callable(function):
        raise HagoError(f"{what} {spec!r} is of type {type(function).__name__}; expected a callable without arguments")
    try:
        return function()
    except HagoError:
        raise
    except Exception as error:
        raise HagoError(f"{what} {spec!r} raised {one_line(error)}") from error
