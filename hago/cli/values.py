"""Values of options: from the words of a command line to numbers, shapes and patterns."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from typing import NoReturn


def fail(text: str) -> NoReturn:
    """Refuse a value."""
    raise argparse.ArgumentTypeError(text)


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        fail(f"got {text!r}, expected numbers with commas between, e.g. 0.485,0.456,0.406")
    return found if all(map(math.isfinite, found)) else fail(f"got {text!r}, expected finite numbers")


def size(text: str) -> tuple[int, int]:
    """Height and width."""
    parts: Sequence[str] = text.lower().split("x")
    if len(parts) > 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        fail(f"got {text!r}, expected a size such as 224 or 96x128 (height x width)")
    return int(parts[0]), int(parts[-1])


def byte_count(text: str) -> int:
    """A size of memory."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|k|M|G)i?B?", text.strip(), re.ASCII | re.IGNORECASE)
    if not found:
        fail(f"got {text!r}, expected a size such as 500MB or 2GB")
    return int(float(found[1]) * 1024 ** " kmg".index(found[2].lower() or " "))


def share(text: str) -> float:
    """A number between 0 and 1."""
    try:
        found = float(text)
    except ValueError:
        fail(f"got {text!r}, expected a number between 0 and 1")
    return found if 0.0 < found < 1.0 else fail(f"got {text!r}, expected a number between 0 and 1")


def shape(text: str) -> tuple[tuple[int, ...], str]:
    """The shape of one sample, and its dtype."""
    sizes, _, dtype = text.partition(":")
    parts = [p for p in sizes.split(",") if p]
    if not all(p.isdecimal() and int(p) > 0 for p in parts):
        fail(f"got {text!r}, expected the shape of one sample, e.g. 3,32,32 or 32:int64")
    return tuple(map(int, parts)), dtype or "float32"


def fixed(text: str) -> tuple[str, int]:
    """A pattern and its bits."""
    pattern, _, bits = text.rpartition("=")
    if not pattern or not bits.isdecimal():
        fail(f"got {text!r}, expected PATTERN=BITS, e.g. 'conv1:1=8'")
    return pattern, int(bits)
