"""The lines of Python that make a report's points again; `hago.cli.report` has the command lines."""

from __future__ import annotations

from hago.report.document import Command
from hago.report.gather import CommandsOf, Source


def python_commands(hardware: str, log: str) -> CommandsOf:
    """What makes the lines of Python that a report shows, which name the user's own values `model` and `data`.

    Args:
        log: the path of the log; empty if there is none.
    """
    replay = f"import hago\nhago.replay(model, {hardware!r}, {log!r}, data)"
    every = "Every trial of the log evaluated again, and every figure compared to the last bit"
    replayed = [Command(f"{every}; `model` is the network, and `data` its calibration data:", replay)]

    def commands(source: Source | None) -> list[Command]:
        if source is not None and source.kind == "few bits":  # the report itself made it
            return []
        if source is None or source.kind == "trial" or not source.path:
            return replayed if log else []
        strategy = repr(source.path)
        if source.kind == "front":
            strategy = f"hago.load_front({source.path!r})[{source.number}].strategy"
        line = f"import hago\nhago.create_quantizer(model, {hardware!r}, {strategy}).realize()"
        return [Command("The integer model, from the file of its strategy; `model` is the network:", line)]

    return commands
