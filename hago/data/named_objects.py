"""Import of objects that the user names on the command line as `package.module:name`.

`graph.model_source` imports models, `data.sources` data, and `cli.options` what other options name.

Only names that the user typed are imported, never names from files.
"""

from __future__ import annotations

import importlib
from typing import Any

from hago.errors import HagoError, did_you_mean


def import_object(spec: str, what: str) -> Any:
    """Import the object that `package.module:name` names.

    Args:
        what: the purpose of the object, in words; errors begin with it.

    Raises:
        HagoError: the text has another form, there is no such module or name, or importing the module failed.
    """
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise HagoError(f"{what} {spec!r}: expected 'package.module:callable', e.g. 'my_models:resnet20'")
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:
        raise HagoError(f"{what} {spec!r}: {_why_not_imported(module_name, error)}") from error
    for part in path.split("."):
        if not hasattr(value, part):
            known = [n for n in dir(value) if not n.startswith("_")]
            raise HagoError(f"{what} {spec!r}: {module_name} has no {part!r}.{did_you_mean(part, known)}")
        value = getattr(value, part)
    return value


def _why_not_imported(module: str, error: Exception) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and (module == missing or module.startswith(missing + ".")):
        return f"there is no module {missing!r}; run in the folder that holds it, or install it"
    return f"importing {module} raised {one_line(error)}"


def one_line(error: BaseException) -> str:
    """The type of an exception that other code raised, and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return type(error).__name__ + (f": {lines[0]}" if lines else "")


def call_named(named: object, spec: str, what: str) -> Any:
    """Call an object that the user named, and return its result.

    Raises:
        HagoError: the object is not callable, or the call raised an exception.
    """
    if not callable(named):
        raise HagoError(f"{what} {spec!r} is of type {type(named).__name__}; expected a callable without arguments")
    try:
        return named()
    except HagoError:
        raise
    except Exception as error:
        raise HagoError(f"{what} {spec!r} raised {one_line(error)}") from error
