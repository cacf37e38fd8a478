"""The page of a report: one HTML file that needs no network, made of the JSON values of a Report and of nothing else.

jinja2 writes the texts, the tables and the drawing of the network, so that they are there without scripts, too; a
script of ours (`page.js`) draws the plots from the same JSON values, which stand in the page, and follows hovers and
clicks. There is no library for plots: bokeh and plotly bring 1 to 5 MB of scripts for what is here a few hundred lines,
and their plots would not follow the page's colours, its choice of a point and the keyboard as ours do.

Names in models and files are hostile until they are escaped: templates escape all values, the script writes text nodes
only, the embedded JSON has no character that ends its element, and the page's own policy forbids every request and
every script but ours.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from hago.cost import METRICS
from hago.errors import HagoError
from hago.report.amounts import cost_figure, cost_text, size_text, sizes_text
from hago.report.document import Report
from hago.serialization.json_text import replace_file
from hago.serialization.summary import measure_name, measure_text, range_text
from hago.serialization.text_table import count, counted

#: The characters of JSON that HTML, or JavaScript before 2019, reads otherwise, as JSON writes them escaped.
_ESCAPED: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
#: Seconds after which the page of a running search loads itself again.
RELOAD_SECONDS: Final = 10
#: The most trials that the table of trials lists.
MOST_ROWS: Final = 2000
#: The number below which all digits of a count are shown.
_ALL_DIGITS: Final = 100_000
#: What words of the page mean.
WORDS: Final[Mapping[str, str]] = {
    "trial": "A choice of bits that the search scored, and its number in the log.",
    "point": "What this page can show: a strategy that was given, a trial of the search, or one shot with few bits.",
    "front": "The trials that no other beats in both the measure and the cost.",
    "strategy": "Bits, thresholds and corrections of a network on one hardware: all that its integer model is made of.",
    "simulated": "The float network with rounding, clipping and overflow put in where the integer model has them.",
    "integer": "The model that runs in integers. It gives what the simulation gives, bit for bit.",
    "conv:0": "An edge: input 0 of the node conv. 'conv:out' is what conv gives, where it is requantized.",
    "edge group": "The inputs of nodes that share one choice of bits. Its bits are those of the integers that are read "
    "there: sums that one node hands to another may have far more than 8, such as 23.",
    "SQNR": "Signal to quantization noise ratio: the power of the float outputs over that of their error, in dB. 6 dB "
    "more are half the error.",
    "agreement": "The share of samples on which the largest output is the same as in the float model.",
    "one shot": "What 'hago quantize' makes, without a search: the most bits that the hardware takes, or at most as "
    "many as are named, calibrated and corrected.",
    "blame": "The part of the outputs' error that a node adds, estimated from the error that it adds itself and from "
    "how strongly the outputs follow its value. What is gained by keeping it float may be more or less.",
    "expected loss": "What a choice of bits should lose: the sum of the sensitivities of its edges, corrected in every "
    "round by what trials lost in fact. A round computes the bits with the least of it at a cost.",
    "asked because": "Why the search wanted this trial: which of its rules chose the bits.",
    "saturation": "A cause of error: values beyond the range of the integers are clipped to its ends.",
    "constants": "A cause of error: weights, biases and other constants are rounded.",
    "requantized": "Converted from integers with one scale to integers with another, mostly from sums to 8 bits.",
    "equalized": "Channels were scaled up or down in one layer and back in the next, which leaves the float network as "
    "it is and makes ranges of channels alike.",
}
#: The columns of a figure without a value.
NONE: Final = "\u2013"


def page_of(document: Mapping[str, Any], template: Any = None) -> str:
    """The page of a report.

    Args:
        document: of `Report.to_json`.
        template: of `page_template`, for callers that make many pages.

    Raises:
        HagoError: jinja2 is not installed.
    """
    template = page_template() if template is None else template
    from markupsafe import Markup

    script = _file("page.js")
    page: str = template.render(
        r=document,
        words=WORDS,
        style=Markup(_file("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(embedded(document)),
        reload=RELOAD_SECONDS if document["search"] and document["search"]["running"] else None,
    )
    return page


def page_template() -> Any:
    """The template of the page, compiled.

    Raises:
        HagoError: jinja2 is not installed.
    """
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise HagoError("the page of a report needs the package jinja2: pip install 'hago[report]'") from None
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "amount": _amount,
        "bits_of": bits_counted,
        "changing_costs": _changing_costs,
        "bytes": lambda value: NONE if value is None else size_text(value),
        "count": _count,
        "counted": counted,
        "figure": lambda value, name: NONE if value is None else _minus(measure_text(name, value)),
        "interval": _interval,
        "listed": listed,
        "label_place": lambda edge, drawing: Markup(_label_place(edge, drawing)),
        "measure_name": measure_name,
        "number": lambda value, digits=4: NONE if value is None else f"{value:.{digits}g}",
        "pairs_of": lambda values: list(values.items()),
        "percent": _percent,
        "same_unit": _same_unit,
        "seconds": lambda value: f"{value:.1f} s",
        "shift": _shift,
        "signs": _signs,
        "span": _span,
    }
    return environment.from_string(_file("page.html"))


def embedded(document: Mapping[str, Any]) -> str:
    """The JSON of a report as it stands in the page: no character of it ends the element that it is in."""
    text = json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)
    return text


def save_page(report: Report, path: Path, template: Any = None) -> None:
    """Write the page of a report, which is replaced atomically.

    Args:
        template: of `page_template`, for callers that make many pages.

    Raises:
        LogError: it could not be written.
        HagoError: jinja2 is not installed.
    """
    replace_file(path, page_of(report.to_json(), template))


@cache
def _file(name: str) -> str:
    """A file of this package."""
    return resources.files("hago.report").joinpath(name).read_text("utf-8")


# ---------------------------------------------------------------- texts
def _amount(value: float | None, name: str) -> str:
    """A cost with its unit."""
    if value is None:
        return NONE
    if name in METRICS and value >= 1e12 and METRICS[name].unit in ("", "cycles"):
        return f"{value / 1e12:.3g}T"
    text = cost_text(name, value).removesuffix(f" {name}")
    return re.sub(r" u(?=[sJ]$)", " \u00b5", text)


def _same_unit(values: Sequence[float | None], name: str) -> list[str]:
    """Amounts of one cost that are compared; those of bytes in one unit."""
    if cost_figure(name).unit != "B":
        return [_amount(value, name) for value in values]
    texts = iter(sizes_text([value for value in values if value is not None]))
    return [NONE if value is None else next(texts) for value in values]


def _changing_costs(document: Mapping[str, Any]) -> dict[bool, list[Mapping[str, Any]]]:
    """The costs of what fewer bits cost, mean bits aside, by whether they differ between its rows."""
    rows = [row["costs"] for row in document["search"]["fewer"]]
    found: dict[bool, list[Mapping[str, Any]]] = {True: [], False: []}
    for cost in document["costs"]:
        if cost["name"] in document["trials"]["costs"] and cost["name"] != "effective_bits":
            found[len({row[cost["name"]] for row in rows}) > 1].append(cost)
    return found


def _count(value: float) -> str:
    """A number of things: all digits, or of a large one three."""
    whole = round(value)
    return f"{whole:,}".replace(",", "\u202f") if whole < _ALL_DIGITS else count(whole)


def _percent(value: float | None, places: int = 1) -> str:
    if value is None:
        return NONE
    if value and abs(value) < 10.0 ** -(places + 2):
        return f"< {10.0**-places:.{places}f} %"
    return f"{100.0 * value:.{places}f} %"


def _interval(ends: Any, name: str) -> str:
    """An interval of a measure; a dash where it is missing or open."""
    if not ends or ends[0] is None or ends[1] is None:
        return NONE
    return " to ".join(map(_minus, range_text(name, ends).split(" to ")))


def _shift(value: float | None, name: str) -> str:
    """A difference of a measure, with its sign; of shares in points."""
    if value is None:
        return NONE
    if name in ("sim_acc", "agreement"):
        return _minus(f"{100.0 * value:+.2f} points")
    return _minus(f"{value:+.2f} dB" if name == "sqnr" else f"{value:+.4g}")


def _minus(text: str) -> str:
    """A number with a minus as long as a plus."""
    return f"\u2212{text[1:]}" if text.startswith("-") else text


def _signs(text: str) -> str:
    """A text whose numbers below zero have a minus as long as a plus, and stay on the line of their units."""
    text = re.sub(r"(?<![\w.-])-(?=\d)", "\u2212", text)
    return re.sub(r"(?<=\d) (?=(?:%|dB|[KMG]?i?B|points|bits)(?!\w))", "\u00a0", text)


def _span(ends: Sequence[float], name: str) -> str:
    """An interval of a difference, with its unit once."""
    low, high = (_shift(end, name) for end in ends)
    return f"{low.partition(' ')[0]} to {high}"


def _label_place(edge: Mapping[str, Any], drawing: Mapping[str, Any]) -> str:
    """Where the label of an edge stands, as attributes of SVG: above the node that it enters, on the side of the line
    that is away from the line's bend and from other edges of the node."""
    (before, _), (x, y) = edge["path"][-2:]
    centre = next(node["x"] for node in drawing["nodes"] if node["name"] == edge["target"])
    left = x < centre if abs(x - centre) > 1 else before > x + 1
    return f'x="{x - 5 if left else x + 5:.1f}" y="{y - 6:.1f}"' + (' text-anchor="end"' if left else "")


def listed(trials: Mapping[str, Any]) -> list[int]:
    """The trials that the table lists: all, or of a long log those of the front, those that raised the best, and others
    evenly."""
    count_of = len(trials["value"])
    if count_of <= MOST_ROWS:
        return list(range(count_of))
    chosen = {*trials["front"], *(i for i, gain in enumerate(trials["gain"]) if gain)}
    step = -(-count_of // max(1, MOST_ROWS - len(chosen)))
    return sorted({*chosen, *range(0, count_of, step)})


def bits_counted(bits: Mapping[str, int]) -> str:
    """How many edge groups have how many bits, the most bits first."""
    counts: dict[int, int] = {}
    for each in bits.values():
        counts[each] = counts.get(each, 0) + 1
    return ", ".join(f"{counts[each]} \u00d7 {each}" for each in sorted(counts, reverse=True))
