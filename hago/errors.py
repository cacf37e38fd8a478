"""The errors and warnings of hago. Each message says where, what was got and expected, and what to do."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Final

#: The most characters of a message, and of a text that a message quotes.
LONGEST_MESSAGE: Final = 2000
LONGEST_QUOTE: Final = 80
#: The number of hexadecimal digits of a hash in messages.
HASH_DIGITS: Final = 12
#: What may be the cause where the hash of a model, of data, or of hardware of the same name is not the one that a file
#: was made with.
OTHER_MODEL: Final = "another network or other weights (did you leave out --weights?)"
OTHER_DATA: Final = "other samples, another order, or another batch size (--batch-size, --samples)"
OTHER_CONTENT: Final = "an edited hardware file, or that of another version of hago"


class HagoError(Exception):
    """Base of every error that hago raises on bad input.

    A message that quotes a long text from a file is cut in the middle, so that it stays readable.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened_to(message, LONGEST_MESSAGE))


class UnsupportedOp(HagoError):
    """An operator, or one of its attributes, that the hardware or a rule refuses."""


class HardwareError(HagoError):
    """A hardware description that is malformed or contradicts itself."""


class StrategyMismatch(HagoError):
    """A strategy or log that was made for another model, hardware or data."""


class InfeasibleBits(HagoError):
    """Bits that no signature of the hardware can hold, or with which sums are too large to be simulated.

    Args:
        node: the node that cannot hold them; empty if no single node is the cause.
        excess: how many bits fewer the operands of the node must have together; 0 where that is not the cause.
    """

    def __init__(self, message: str, node: str = "", excess: int = 0) -> None:
        super().__init__(message)
        self.node, self.excess = node, excess


class GraphError(HagoError):
    """A model that could not be imported, or a graph that breaks an invariant."""


class LogError(HagoError):
    """A log or strategy file that is truncated, edited or not written by hago."""


class ModelFileError(HagoError):
    """A stored integer model that is truncated, edited or not written by hago."""


class DataError(HagoError):
    """Calibration data that is empty, ragged, or not finite."""


def shortened_to(text: str, limit: int) -> str:
    """The text, or its beginning and its end if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    end = limit // 4
    return f"{text[: limit - end - 5]} ... {text[len(text) - end :]}"


def shortened(value: Any) -> str:
    """The form in which messages quote a value: its `repr`, on one line, and cut in the middle if it is long."""
    return shortened_to("; ".join(line.strip() for line in repr(value).splitlines()), LONGEST_QUOTE)


class HagoWarning(UserWarning):
    """The category of hago's warnings: hago did something other than what the user asked for or would expect.

    The message says what hago did instead, and how to get what was asked for.
    """


def warn(text: str) -> None:
    """Issue a `HagoWarning` that is attributed to the line of the user's code that called hago.

    Python shows equal warnings of one line once; `warnings.simplefilter("error", hago.HagoWarning)` makes them errors.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "hago":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, HagoWarning, stacklevel=level)


def as_strings(given: str | Iterable[str] | None, what: str) -> tuple[str, ...]:
    """The strings of an argument that takes one string or several.

    Args:
        given: a single string, an iterable of strings, or None for no strings.
        what: the name of the argument, for the message.

    Raises:
        HagoError: an entry is not a string.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    entries = tuple(given) if isinstance(given, Iterable) else (given,)
    odd = [entry for entry in entries if not isinstance(entry, str)]
    if odd:
        raise HagoError(f"{what} holds {odd[0]!r}, a {type(odd[0]).__name__}; expected a string, or a list of strings")
    return entries


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """`" Did you mean 'conv2d'?"` if a known name is close to `got`, else an empty string."""
    if len(got) > LONGEST_QUOTE:
        return ""
    close = difflib.get_close_matches(got, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_choice(name: str, got: str, known: Sequence[str]) -> None:
    """Refuse an option that is not one of the known values.

    Raises:
        HagoError: `got` is not in `known`; the closest is suggested.
    """
    if got not in known:
        raise HagoError(f"{name} is {got!r}; expected one of {', '.join(known)}." + did_you_mean(str(got), known))
