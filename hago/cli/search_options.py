"""What `hago search` accepts beside what every quantization does."""

from __future__ import annotations

import argparse

from hago.cli.tables import table_options
from hago.cli.values import byte_count, share
from hago.cost import METRICS
from hago.objective import OBJECTIVES
from hago.search.searchers import AUTO, SEARCHERS


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """The searcher, its goal and budget, and what it writes and runs on."""
    group = parser.add_argument_group("search")
    group.add_argument(
        "--searcher",
        default=AUTO,
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"{AUTO} (limited where costs are, else gradient), "
        f"{', '.join(SEARCHERS)}, or package.module:callable; default: %(default)s",
    )
    group.add_argument(
        "--objective",
        default="sqnr",
        metavar="NAME",
        help=f"{', '.join(OBJECTIVES)}, or package.module:callable; default: %(default)s",
    )
    _goal(parser)
    table_options(parser)
    _course(group)
    _outcome(group)
    _machine(group)


def _course(group: argparse._ArgumentGroup) -> None:
    """How long a search goes on, and where."""
    group.add_argument("--budget", metavar="LIMIT", help="'200 trials', '10m', '50 forwards'; default: none")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all randomness; default: %(default)s")
    group.add_argument("--log", metavar="FILE", help="default: logs/MODEL-HARDWARE.jsonl; continued if it is there")
    group.add_argument("--reuse", action="append", metavar="LOG", help="equal plans in this log are not tried again")
    group.add_argument(
        "--search-topology",
        action=argparse.BooleanOptionalAction,
        help="let nodes be float where the hardware takes both; default: if bops, cycles, latency or energy is in use",
    )
    group.add_argument("--no-resume", action="store_true", help="refuse a log that is there already")
    group.add_argument(
        "--race",
        type=share,
        nargs="?",
        const=0.01,
        metavar="ALPHA",
        help="give a point up once its samples say that it is worse than the best so far; a point that is not is "
        "given up with probability ALPHA at most (%(const)s where only --race is given)",
    )


def _outcome(group: argparse._ArgumentGroup) -> None:
    """What becomes of the points that were found."""
    group.add_argument("--held-out", metavar="DATA", help="more data, to report the best strategy on")
    group.add_argument("--allow-overflow", action="store_true", help="take a strategy that overflowed if none did not")
    group.add_argument(
        "--front", metavar="FILE", help="the points that none beats in both objective and cost; default: beside --save"
    )
    group.add_argument(
        "--finetune",
        nargs="?",
        const="",
        metavar="NAME=VALUE,...",
        help="train what was found as the last stage, and keep it where it is better, e.g. 'budget=5m' or "
        "'scheme=dorefa_relative,steps=400'; the trained weights go beside --save",
    )


def _machine(group: argparse._ArgumentGroup) -> None:
    """What points are scored on."""
    group.add_argument(
        "--executor", metavar="WHERE", help="processes:N, threads:N or dask://host:port; default: this process alone"
    )
    group.add_argument(
        "--cache",
        type=byte_count,
        metavar="SIZE",
        help="of what each process keeps of earlier trials, e.g. 2GB; default: a quarter of the free memory",
    )


def _goal(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("goal")
    group.add_argument("--maximize", metavar="NAME", help="the same as --objective")
    group.add_argument("--minimize", metavar="COST", help=f"make a cost least instead: {', '.join(METRICS)}")
    for option, figure, example in (
        ("--keep", "measure", "'agreement >= 99 %%'"),
        ("--budget-cost", "cost", "'weight_bytes <= 4 MB'"),
    ):
        text = f"a limit on a {figure}, e.g. {example}; may be repeated"
        group.add_argument(option, action="append", metavar="LIMIT", help=text)
