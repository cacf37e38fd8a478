"""What the command line says of tables that a search is given."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Final

from hago.strategy import Strategy

#: Nodes that a line lists before it says "and n more".
_LISTED: Final = 5


def table_options(parser: Any) -> None:
    """The options that give a search the tables of another tool."""
    group = parser.add_argument_group("tables of TPU-MLIR")
    group.add_argument("--calibration-table", metavar="FILE", help="ranges by node; those it lacks are estimated")
    group.add_argument("--quantize-table", metavar="FILE", help="modes by node: which stay float, or have 8 or 4 bits")


def tables_of(args: Namespace) -> dict[str, Any]:
    """The tables, as the public calls take them."""
    return {"thresholds": args.calibration_table, "modes": args.quantize_table}


def table_lines(strategy: Strategy) -> list[str]:
    """A line that names the nodes without a row, where a table lacks any."""
    missing = strategy.made_by.get("estimated")
    if not missing:
        return []
    more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
    return [f"  no row in the calibration table, so estimated: {', '.join(missing[:_LISTED])}{more}"]
