"""Pictures and data frames of results: the optional packages behind `plot` and `to_frame`, and the picture that a
notebook shows below a summary.

Matplotlib and pandas are imported where they are used. A plot changes no setting and no current figure of matplotlib:
with axes of the caller's, pyplot is not imported.
"""

from __future__ import annotations

import base64
import importlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hago.errors import HagoError
from hago.serialization.summary import printable

#: Width and height of the picture in a notebook, in inches, and its pixels per inch as a web page counts them.
SIZE: Final = (6.4, 3.6)
DENSITY: Final = 100
#: Colors of the color-blind safe palette of Okabe and Ito (https://jfly.uni-koeln.de/color/).
BLUE, ORANGE, GREEN, RED, GRAY, LIGHT_BLUE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999", "#56B4E9"


def matplotlib_module(name: str) -> Any:
    """A module of matplotlib.

    Raises:
        HagoError: matplotlib is not installed.
    """
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError:
        raise HagoError("plots need the package matplotlib: pip install 'hago[plot]'") from None


def axes_for(ax: Any) -> Any:
    """The axes to draw on: those of the caller, or those of a new figure of pyplot, which a notebook shows.

    Raises:
        HagoError: matplotlib is not installed.
    """
    if ax is not None:
        return ax
    return matplotlib_module("pyplot").subplots(figsize=SIZE, layout="constrained")[1]


def data_frame(rows: Sequence[Mapping[str, Any]], index: str) -> Any:
    """A data frame of pandas with a row for each mapping.

    Args:
        rows: values by the names of the columns, which are ordered as they first appear.
        index: the column that becomes the index.

    Raises:
        HagoError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise HagoError("data frames need the package pandas: pip install 'hago[pandas]'") from None
    columns = dict.fromkeys(name for row in rows for name in row)
    return pandas.DataFrame(list(rows), columns=list(columns) or [index]).set_index(index)


def plain_text(text: str) -> str:
    """A name as a label: with control characters as escapes, and with dollar signs that matplotlib does not read as
    TeX."""
    return printable(text).replace("$", r"\$")


def style_axes(ax: Any, grid: str = "both") -> None:
    """Draw a light grid behind the data, and no frame at the top and the right."""
    ax.grid(True, axis=grid, color="#DDDDDD", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def picture(plot: Callable[[Any], Any], alt: str) -> str:
    """What a plot draws, as an `<img>` with its PNG inside, for a notebook; empty where matplotlib is not installed.

    Args:
        plot: draws on axes.
        alt: the picture in words.
    """
    try:
        figure_type = matplotlib_module("figure").Figure
    except HagoError:
        return ""
    figure, file = figure_type(figsize=SIZE, layout="constrained"), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that the font lacks, in names of the user's
        plot(figure.subplots())
        figure.savefig(file, format="png", dpi=1.5 * DENSITY, metadata={"Software": None})
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return f'<img alt="{alt}" width="{SIZE[0] * DENSITY:.0f}" src="data:image/png;base64,{data}"/>'
