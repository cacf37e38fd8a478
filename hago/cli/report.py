"""`hago report`: the page of a log, strategies or a front; and the pages that `hago search --report` writes."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from hago.calibration import named_estimator
from hago.cli.console import Console, Outcome, command_line
from hago.cli.options import (
    check_command,
    data_words,
    estimator_argument,
    load_batches,
    load_chip,
    load_held_out,
    named,
    strategy_command,
)
from hago.cli.output_files import REPORT, check_output, default_stem, folders_of, model_name
from hago.data import JobProgress
from hago.errors import HagoError, warn
from hago.graph.model_source import load_model
from hago.hardware import Hardware, available_hardware
from hago.report import (
    Command,
    CommandsOf,
    LiveReport,
    Records,
    Report,
    ReportOptions,
    Source,
    gather_report,
    read_records,
    save_page,
)
from hago.search import (
    DEFAULT_EFFORT,
    OneShot,
    QuantizationOptions,
    SearchCallback,
    SearchOutcome,
    is_of_a_cost,
    logged_corrections,
    logged_effort,
    parse_limits,
    with_search_topology,
)
from hago.search.objective import OBJECTIVES
from hago.searchers import SEARCHERS, searcher_text
from hago.serialization.text_table import bytes_text, wrapped
from hago.study import Header, interruptible_job, read_header

#: What stands for the data in commands where none was given.
_DATA = "DATA"


def report_command(args: Namespace, console: Console) -> Outcome:
    """Write the page of a log, strategies or a front, and show its answers."""
    records = read_records(args.records)
    hardware = _hardware(args, records)
    stem = default_stem(args, hardware, "report", *sorted(records.model_hashes.values()))
    saved = check_output(Path(args.save or Path("reports") / f"{stem}.html"), REPORT, "--save" if args.save else "")
    dataset = None if args.data is None else load_batches(args)
    if dataset is None and args.held_out is not None:
        raise HagoError("--held-out is further data beside --data, which is not given; give both")
    options = ReportOptions(
        points=args.points,
        remedies=args.remedies,
        title=args.title or "",
        model_name=model_name(args.model),
        objective=None if args.objective is None else named(args.objective, "objective"),
        estimator=estimator_argument(args.estimator),
    )
    commands = commands_for(args, records.log_path, console.words)
    model, held_out = load_model(args.model, args.weights), load_held_out(args)
    with interruptible_job("report") as steps:
        report = gather_report(model, hardware, records, dataset, held_out, options, commands, steps)
        steps("writing the page")
        with folders_of(saved):
            save_page(report, saved)
    console.written.append(str(saved))
    lines = [*text_of(report), "", f"report    {saved} ({bytes_text(saved.stat().st_size)}), which any browser opens"]
    return Outcome("\n".join(lines), report.to_json())


def _hardware(args: Namespace, records: Records) -> Hardware:
    """The hardware that `--hardware` names, or else that for which the records were made."""
    if args.hardware is not None:
        return load_chip(args, args.hardware)
    name = records.hardware_name
    if name is None:
        raise HagoError("the records do not say which hardware they are for; give --hardware")
    if name not in available_hardware():
        raise HagoError(f"the records are for hardware {name!r}, which does not ship with hago; give --hardware")
    return load_chip(args, name)


# ---------------------------------------------------------------- the page of a search
@contextlib.contextmanager
def live_page(args: Namespace, console: Console, hardware: Hardware, log: Path) -> Iterator[list[SearchCallback]]:
    """The callback that keeps the page of `--report` current while a search runs, if there is one."""
    if args.report is None:
        yield []
        return
    options, commands = ReportOptions(model_name=model_name(args.model)), commands_for(args, str(log), console.words)
    with LiveReport(Path(args.report), log, hardware, options, commands) as page:
        yield [page]


def write_page(
    args: Namespace,
    console: Console,
    outcome: SearchOutcome,
    one_shot: OneShot | str,
    records: Sequence[Path],
    steps: JobProgress,
) -> str | None:
    """Write the page of a search that has ended, in full; returns its path, or None with a warning if it could not be
    written.

    Args:
        one_shot: of `one_shot_of_search`.
        records: the files of the search.
        steps: shows the progress.
    """
    try:
        _write_page(args, outcome, one_shot, records, console.words, steps)
    except HagoError as error:
        warn(f"the page of the search is missing, or of its log alone: {error}")
        return None
    console.written.append(args.report)
    return str(args.report)


def _write_page(
    args: Namespace,
    outcome: SearchOutcome,
    one_shot: OneShot | str,
    records: Sequence[Path],
    words: Sequence[str],
    steps: JobProgress,
) -> None:
    prepared, read = outcome.prepared, read_records(list(map(str, records)))
    options = ReportOptions(model_name=model_name(args.model))
    commands = commands_for(args, read.log_path, words)
    report = gather_report(
        prepared.graph.uncorrected,
        prepared.hardware,
        read,
        prepared.batches,
        outcome.held_out,
        options,
        commands,
        steps,
        one_shot if isinstance(one_shot, str) else one_shot.quantizer.plan,
    )
    save_page(report, Path(args.report))


# ---------------------------------------------------------------- texts and commands
def text_of(report: Report) -> Iterator[str]:
    """The answers for the point that the page shows first, in words."""
    if report.shown is None:
        yield f"{report.title}: no point is shown in full"
        for note in report.notes:
            yield from wrapped(f"  {note}", " " * 4)
        return
    point = report.points[report.shown]
    yield f"{report.title}: {point.title}"
    for each in point.short:
        yield from wrapped(f"  {each.question} {each.answer}", " " * 4)


def commands_for(args: Namespace, log: str, made_by: Sequence[str]) -> CommandsOf:
    """What makes the commands that a page shows.

    Args:
        log: the path of the log; empty if there is none.
        made_by: the words of this command line.
    """
    given = args if args.data is not None else Namespace(**{**vars(args), "data": _DATA})
    weights = args.weights

    def replayed() -> list[Command]:
        if not log:
            return []
        words = ["replay", args.model, log, "--data", given.data, *(["--weights", weights] if weights else [])]
        line = command_line(*words, *data_words(given))
        return [Command("Every trial of the log evaluated again, and every figure compared to the last bit:", line)]

    def searched() -> list[Command]:
        header = read_header(Path(log)) if log and made_by[:1] != ["search"] else None
        words = None if header is None else search_words(header, given.hardware)
        if words is None:
            return []
        words = ["search", args.model, *words, "--data", given.data, *(["--weights", weights] if weights else [])]
        line = command_line(*words, *data_words(given), "--log", log)
        return [Command("The search, continued from its log, which does not say its budget:", line)]

    def commands(source: Source | None) -> list[Command]:
        made = Command("This page, made again:", command_line(*made_by))
        if source is None:
            return [made, *searched(), *replayed()]
        if source.kind == "few bits":
            return [made]
        if source.kind == "trial" or not source.path:
            return replayed()
        if source.kind == "strategy":
            inspect = strategy_command("inspect", given, Path(source.path), weights)
            realize = check_command(given, Path(source.path), weights)
            return [
                Command("The integer model, checked against its simulation bit for bit:", realize),
                Command("The errors of all layers in a terminal:", inspect),
            ]
        path, more = Path(source.path), ("--trial", str(source.trial))
        return [
            Command(
                "The integer model of this trial of the front, checked against its simulation bit for bit:",
                check_command(given, path, weights, *more),
            ),
            Command("The errors of all layers in a terminal:", strategy_command("inspect", given, path, weights, more)),
        ]

    def plain(source: Source | None) -> list[Command]:
        return [Command(each.what, _plain(each.line)) for each in commands(source)]

    return plain


def search_words(header: Header, hardware: str | None) -> list[str] | None:
    """The options of `hago search` that a log was begun with; None where options of the command line cannot say them.

    Args:
        hardware: the name or the path that the user gave; by default the name in the log.
    """
    settings, searcher = header.settings, header.searcher
    if not {"race", "thresholds"}.isdisjoint(settings) or searcher["name"] not in SEARCHERS:
        return None
    if header.objective not in OBJECTIVES or not _is_estimator(str(header.estimator)):
        return None  # of the user's own, and the log does not say where it is
    options = {k: v for k, v in searcher["options"].items() if v not in ("", None)}
    words = ["--hardware", hardware or header.hardware.name, "--searcher", searcher_text(searcher["name"], options)]
    words += ["--objective", str(header.objective)] if header.objective != "sqnr" else []
    words += ["--seed", str(header.seed)] if header.seed else []
    words += ["--minimize", settings["minimize"]] if "minimize" in settings else []
    for limit in settings.get("limits_given", settings.get("limits", ())):
        words += ["--budget-cost" if is_of_a_cost(limit) else "--keep", limit]
    effort = logged_effort(header)
    names, _ = logged_corrections(header)
    words += ["--effort", effort.name] if effort.name != DEFAULT_EFFORT else []
    if names != effort.corrections:
        words += [word for name in names or ("none",) for word in ("--corrections", name)]
    words += ["--estimator", str(header.estimator)] if not settings.get("refined") else []
    is_searched, figures = settings.get("topology") == "searched", parse_limits(settings.get("limits"))
    named = [name for name in (options.get("cost"), settings.get("minimize")) if name]
    costs = [*named, *(x.figure for x in figures if x.is_cost)]
    if is_searched != bool(with_search_topology(QuantizationOptions(), costs, None).search_topology):
        words.append("--search-topology" if is_searched else "--no-search-topology")
    words += [word for pattern in header.keep_float for word in ("--keep-float", pattern)]
    words += [word for key, bits in header.fix_bits.items() for word in ("--fix-bits", f"{key}={bits}")]
    return words


def _is_estimator(name: str) -> bool:
    """Whether an estimator is one of hago's own."""
    try:
        named_estimator(name)
    except HagoError:
        return False
    return True


def _plain(line: str) -> str:
    """A command as it is entered where hago is installed, whatever the interpreter that made the page."""
    own = command_line()
    return f"hago{line.removeprefix(own)}" if line.startswith(f"{own} ") else line
