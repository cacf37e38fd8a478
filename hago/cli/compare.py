"""The command that sets realizations of a strategy side by side: `hago compare`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from hago.cli.options import NO, OK, Outcome, Voices, hardware_of, load_batches
from hago.comparison import REALIZATIONS, compare_realizations
from hago.errors import HagoError
from hago.model_source import load_model
from hago.strategy import Strategy

#: What must equal the reference engine to the last bit.
_OURS = ("fast", "simulated")


def compare_options(parser: Any) -> None:
    """The command's own options."""
    known = ",".join(REALIZATIONS)
    parser.add_argument(
        "--realizations", default=known, metavar="NAME,...", help=f"some of {known}; what cannot run here is skipped"
    )
    parser.add_argument("--base", default="reference", metavar="NAME", help="compare with this; default: %(default)s")


def compare(args: Namespace, voices: Voices) -> Outcome:
    """Realizations on the same data, node by node; exit code 1 where one of hago's own differs from another."""
    strategy = Strategy.load(args.record)
    hardware, model = hardware_of(args, strategy), load_model(args.model, args.weights)
    names = [n.strip() for n in args.realizations.split(",") if n.strip()]
    if not names:
        raise HagoError("--realizations names none")
    found = compare_realizations(model, hardware, strategy, load_batches(args), names, args.base)
    ours = [a for a in found.against if a.name in _OURS and found.base in ("reference", *_OURS)]
    wrong = any(p.differing for a in ours for p in (*a.integers, *a.outputs))
    return Outcome(str(found), found.to_json(), NO if wrong else OK)
