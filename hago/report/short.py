"""The answers to what readers of a report ask first: what was lost, whether one shot would do, what fewer bits cost,
which layer hurts, what stays float, whether anything can overflow, and how it is done again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from hago.report.amounts import STORED, cost_figure, cost_text, sizes_text
from hago.report.document import (
    AskedGoal,
    AskedLimit,
    FewerBits,
    Figure,
    InShort,
    NodeDetail,
    Pair,
    PairedFigure,
    Point,
    SearchStory,
    Verdict,
)
from hago.report.goals import keeps, least_of, limit_text, number_text
from hago.serialization.summary import MOST_DB, measure_text, names_text, range_text
from hago.serialization.text_table import counted

#: The bits that the answer on fewer bits is about, where the log has them.
ASKED_BITS: Final = 6
#: What means of bits are over, in words.
MEAN_OF: Final = {"weights": "over all weights", "edges": "over the edges whose bits the search varied"}
#: What one shot is, in words.
ONE_SHOT: Final = "one shot ('hago quantize': the most bits everywhere, without a search)"
#: What is said of figures of trials where layers of the strategy were corrected.
BEFORE: Final = ", before layers were corrected"
#: What is said of a figure that is missing or not finite.
_NOT_MEASURED: Final = "not measured"
#: Gains in dB that are not worth a word.
_NO_GAIN: Final = 0.05
#: Mean bits above which the answers say why they are so many.
_MANY_BITS: Final = 8.0


@dataclass(frozen=True, slots=True)
class Told:
    """What the answers for all points are read from; `gather_report` makes it.

    Args:
        cost: the cost of the front.
        hardware: its name.
        trials: number of trials; 0 without a log.
        goal: what was asked of the search; None where nothing is limited or minimized.
        first: the point that is shown first.
        few: one shot with at most ASKED_BITS bits; None where it was not made.
    """

    search: SearchStory | None
    measure: Figure
    cost: str
    hardware: str
    trials: int
    goal: AskedGoal | None = None
    first: Point | None = None
    few: Point | None = None


def named_trials(search: SearchStory | None) -> list[int]:
    """The trials that the answers name: that with few bits, and that with the most."""
    asked = _asked(search)
    return [] if search is None or asked is None else list(dict.fromkeys([asked.trial, search.fewer[0].trial]))


def answers(point: Point, told: Told, to_few: Pair | None = None) -> tuple[InShort, ...]:
    """The answers for one point: first what was asked, then one shot where that is surely better.

    Args:
        to_few: `told.few` beside `told.first`, on the last data set; None where either was not made.
    """
    held, is_missed = _goal(point, told)
    one_shot, is_worse = _against_one_shot(point, told)
    against = InShort("Is it better than one shot?", one_shot, alarm=is_worse)
    asked = (
        InShort("What was asked, and does it hold?", held, alarm=is_missed, leads=True),
        *((against,) if is_worse else ()),
        InShort("What does it give, and what does it lose?", _lost(point, told)),
        *(() if is_worse else (against,)),
        InShort(f"What does it cost to go to {ASKED_BITS} bits?", _to_few(point, told, to_few)),
        InShort("Which layer loses most, and why?", _worst(point)),
        InShort("Does all of it run in integers?", _floats(point)),
        InShort("Can anything overflow?", _overflow(point.nodes)),
        InShort("How is it done again?", point.commands[0].line if point.commands else _again(point)),
    )
    return tuple(each for each in asked if each.answer)


def _again(point: Point) -> str:
    """How a point without a command is made again."""
    if point.kind != "few bits":
        return ""
    return f"The report makes it, in one shot with the options of the first point and at most {ASKED_BITS} bits."


# ---------------------------------------------------------------- what was asked
def _goal(point: Point, told: Told) -> tuple[str, bool]:
    """What was asked of the search and whether it holds, and whether it does not for what the search gave."""
    goal = told.goal
    if goal is None:
        return "", False
    within = f" with {' and '.join(limit.text for limit in goal.limits)}" if goal.limits else ""
    if goal.minimize:
        asked = f"least {goal.minimize}{within}"
        value = point.costs.get(goal.minimize)
        got = "" if value is None else cost_text(goal.minimize, value)
    else:
        asked = f"{'least' if goal.is_loss else 'highest'} {goal.objective}{within}"
        of_data = [
            f"{measure_text(told.measure.name, -value if goal.is_loss else value)} on the {verdict.data}"
            for verdict in point.verdicts
            if _is_known(value := verdict.model("simulated").figures.get(told.measure.name))
        ]
        got = " and ".join(of_data)
    if point.kind == "strategy":
        sentences = [f"{asked[0].upper()}{asked[1:]}{f': {got}' if got else ''}."]
    else:  # a trial need not be the one that the search gave
        sentences = [f"The {asked} was asked.{f' This trial has {got}.' if got else ''}"]
    is_missed = False
    for limit in goal.limits:
        subject = "The limit" if len(goal.limits) == 1 else f"The limit {limit.text}"
        text, held = _on_cost(limit, point) if limit.is_cost else _on_measure(limit, point)
        sentences.append(f"{subject} {text}.")
        is_missed |= held is False
    if point.uncorrected and any(not limit.is_cost for limit in goal.limits):
        sentences.append("All of it is of before layers were corrected, and limits on measures are for after.")
    return " ".join(sentences), is_missed and not point.uncorrected


def _on_cost(limit: AskedLimit, point: Point) -> tuple[str, bool | None]:
    """Whether a limit on a cost holds, in words, and as a value; None where that is not known."""
    value = point.costs.get(limit.figure)
    if value is None:
        return "was not checked", None
    held, most = keeps(limit, value), limit.most
    of = f"; asked: at most {limit_text(limit, most, value)}" if limit.is_relative and most is not None else ""
    return f"{'holds' if held else 'does not hold'} ({number_text(limit, value, most)}{of})", held


def _on_measure(limit: AskedLimit, point: Point) -> tuple[str, bool | None]:
    """Likewise of a limit on a measure, on every data set."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for verdict in point.verdicts:
        figures, whole = verdict.model("simulated").figures, verdict.model("float").figures.get(limit.figure)
        value, least = figures.get(limit.figure), least_of(limit, whole)
        if least is None or not _is_known(value):
            continue
        of = ""
        if limit.is_relative:
            of = f"; asked: at least {limit_text(limit, least, value)}"
        text = f"on the {verdict.data} ({number_text(limit, value, least)}{of})"
        found[keeps(limit, value, whole)].append(text)
    kept, missed = (" and ".join(found[held]) for held in (True, False))
    if not kept and not missed:
        return "was not measured", None
    if not missed:
        return f"holds {kept}", True
    return (f"holds {kept} and not {missed}" if kept else f"does not hold {missed}"), False


# ---------------------------------------------------------------- what it gives
def _lost(point: Point, told: Told) -> str:
    sentences = []
    if point.verdicts:
        verdict = point.verdicts[-1]  # held-out data where there is some
        sentences.append(_on_data(verdict, BEFORE if point.uncorrected else ""))
    size, whole = point.costs.get("weight_bytes"), point.float_costs.get("weight_bytes")
    if size is not None and whole:
        now, before, stored = sizes_text([size, whole, point.stored_bytes])
        part = f"{100 * size / whole:.0f} % of the float model's"
        sentences.append(
            f"Weights take {now} packed instead of {before}, {part}; {told.hardware} stores them in {stored}."
        )
    return " ".join(sentences)


def _on_data(verdict: Verdict, before_corrections: str) -> str:
    before, after = verdict.model("float").figures, verdict.model("simulated").figures
    paired = next((d for d in verdict.differences if d.first == "float" and d.measure == "sim_acc"), None)
    where = f"On the {verdict.data} ({counted(int(after['samples']), 'sample')})"
    sqnr = f"the outputs have an SQNR of {_figure('sqnr', after['sqnr'])}{before_corrections}"
    if not _is_known(after["sqnr"]):
        sqnr = "the SQNR of the outputs is not measured"
    elif after["sqnr"] >= MOST_DB:
        sqnr = "the outputs are exactly those in float"
    if "sim_acc" not in after or paired is None:
        if not _is_known(after.get("agreement")):
            return f"{where}, {sqnr}."
        ends = after.get("agreement_interval")
        sure = f" (95 % interval: {range_text('agreement', ends)})" if ends and all(map(_is_known, ends)) else ""
        agreed = _figure("agreement", after["agreement"])
        return f"{where}, {sqnr}, and in {agreed} of them the largest output is the same as in float{sure}."
    return (
        f"{where}, accuracy is {_figure('sim_acc', after['sim_acc'])} instead of "
        f"{_figure('sim_acc', before['sim_acc'])} in float ({interval_text(paired)}); {sqnr}."
    )


def interval_text(paired: PairedFigure) -> str:
    """The difference of a measure with its interval; of a share in points."""
    if not _is_known(paired.difference):
        return _NOT_MEASURED
    unit, factor = (" dB", 1.0) if paired.measure == "sqnr" else (" points", 100.0)
    difference = f"{factor * paired.difference:+.2f}{unit}"
    if not _is_known(paired.low) or not _is_known(paired.high):
        return difference
    if paired.low == paired.high == 0.0:
        return "the same on every sample"
    chance = "" if paired.better else ", not significant"
    return f"{difference}, 95 %: {factor * paired.low:+.2f} to {factor * paired.high:+.2f}{chance}"


def _is_known(value: float | None) -> TypeGuard[float]:
    """Whether a figure was measured and is finite."""
    return value is not None and math.isfinite(value)


def _figure(measure: str, value: float | None) -> str:
    """A value of a measure with its unit, or that it was not measured."""
    return measure_text(measure, value) if _is_known(value) else _NOT_MEASURED


def _against_one_shot(point: Point, told: Told) -> tuple[str, bool]:
    """The answer, and whether one shot is surely better in the first measure in which it is compared."""
    if not point.verdicts:
        return "", False
    verdict = point.verdicts[-1]
    found = {d.measure: d for d in verdict.differences if d.first == "one shot"}
    if not found:
        return "", False
    first = found.get("sim_acc") or found.get("agreement") or next(iter(found.values()))
    worse = [d for d in found.values() if d.better == "one shot"]
    better = [d for d in found.values() if d.better == "simulated"]
    texts = ", ".join(f"{_MEASURES.get(d.measure, d.measure)} ({interval_text(d)})" for d in found.values())
    where = f"Against {ONE_SHOT} on the {verdict.data}, sample by sample: {texts}"
    saved, is_saved = _saved_against_one_shot(point, told)
    one_of = (
        "" if saved and told.goal and told.goal.minimize == "weight_bytes" else _size_of_one_shot(point, told.hardware)
    )
    if point.uncorrected:
        one_of += " Layers of one shot were corrected, and those of this trial were not."
    is_trial = told.trials > 1 and point.kind != "few bits"
    one_of += f" This point is one of {counted(told.trials, 'trial')}." if is_trial else ""
    if is_saved:
        return f"{saved} {_lost_for_it(found)} {where}.{one_of}", False
    if saved:
        one_of = f" {saved}{one_of}"
    if worse and not better:
        names = names_text([_MEASURES.get(d.measure, d.measure) for d in worse])
        return f"No: one shot is surely better in {names}. {where}.{one_of}", True
    if first.better == "one shot":
        return (
            f"Not in {_MEASURES.get(first.measure, first.measure)}, where one shot is surely better. {where}.{one_of}",
            True,
        )
    if not any(_is_known(d.difference) for d in found.values()):
        return f"It was not measured. {where}.{one_of}", False
    if not better:
        same = all(d.low == d.high == 0.0 for d in found.values())
        return f"{'It is the same' if same else 'Not surely: it may be chance'}. {where}.{one_of}", False
    only = "" if first in better else " only"
    return (
        f"Surely{only} in {names_text([_MEASURES.get(d.measure, d.measure) for d in better])}. {where}.{one_of}",
        False,
    )


def _saved_against_one_shot(point: Point, told: Told) -> tuple[str, bool]:
    """What a point has less than one shot of the cost that is minimized, in words, and whether it has less; nothing
    where none is minimized, or that of one shot is not known."""
    name = "" if told.goal is None else told.goal.minimize
    own, other = point.costs.get(name), point.one_shot_costs.get(name)
    if own is None or not other:
        return "", False
    now, before = (
        sizes_text([own, other]) if cost_figure(name).unit == "B" else (cost_text(name, v) for v in (own, other))
    )
    if own < other:
        part = 100 * (1 - own / other)
        saved = f"{part:.1f} %" if part >= 0.05 else "less than 0.1 %"
        text = f"It saves {saved} of {name}: {now} instead of {before}."
    else:
        more = f": {now}, as one shot" if own == other else f": {now}, and one shot {before}"
        text = f"It saves nothing of {name}{more}."
    stored = [costs.get(STORED) for costs in (point.costs, point.one_shot_costs)]
    if name == "weight_bytes" and own < other and stored[0] is not None and stored[1] is not None:
        now, before = sizes_text([stored[0], stored[1]])
        if stored[0] == stored[1]:
            text += f" But {told.hardware} stores the weights in as many bytes as one shot's, {now}."
        else:
            text += f" As {told.hardware} stores them, weights take {now} instead of {before}."
    return text, own < other


def _lost_for_it(found: Mapping[str, PairedFigure]) -> str:
    """What is lost for the cost that is saved."""
    names = {
        better: names_text([_MEASURES.get(d.measure, d.measure) for d in found.values() if d.better == better])
        for better in ("one shot", "simulated")
    }
    if names["one shot"]:
        also = f", and this is surely better in {names['simulated']}" if names["simulated"] else ""
        return f"For that, one shot is surely better in {names['one shot']}{also}."
    if names["simulated"]:
        return f"Nothing is surely lost for that, and it is surely better in {names['simulated']}."
    if not any(_is_known(d.difference) for d in found.values()):
        return "What is lost for that was not measured."
    if all(d.low == d.high == 0.0 for d in found.values()):
        return "Nothing is lost for that."
    return "Nothing is surely lost for that: differences may be chance."


def _size_of_one_shot(point: Point, hardware: str) -> str:
    """What the point saves against one shot."""
    sizes = []
    for name, words in (("weight_bytes", "packed"), (STORED, f"as {hardware} stores them")):
        own, other = point.costs.get(name), point.one_shot_costs.get(name)
        if own is None or other is None:
            return ""
        sizes.append((words, *sizes_text([own, other]), own == other))
    if all(is_same for *_, is_same in sizes):
        now = " and ".join(f"{own} {words}" for words, own, _, _ in sizes)
        return f" Its weights take as many bytes as those of one shot: {now}."
    texts = [
        f"{own} {words}, {'as in one shot' if is_same else f'instead of {other}'}"
        for words, own, other, is_same in sizes
    ]
    return f" Its weights take {'; and '.join(texts)}."


_SHARES: Final = ("sim_acc", "agreement")
_MEASURES: Final = {"sim_acc": "accuracy", "sqnr": "SQNR"}


# ---------------------------------------------------------------- what fewer bits cost
def _asked(search: SearchStory | None) -> FewerBits | None:
    """The trial with at most ASKED_BITS bits; None where there is none."""
    return None if search is None else next((each for each in search.fewer if each.bits == ASKED_BITS), None)


def _to_few(point: Point, told: Told, pair: Pair | None) -> str:
    """What one shot with few bits saves and loses against the first point; where that does not compare, what trials
    with fewer bits do, but of the point with few bits itself nothing."""
    few, first = told.few, told.first
    if few is None or first is None or pair is None or first.uncorrected or not _has_less(few, first):
        return "" if point is few else _fewer(told)
    texts = [
        f"{_MEASURES.get(d.measure, d.measure)} is {_figure(d.measure, _simulated(few, pair.data, d.measure))} instead "
        f"of {_figure(d.measure, _simulated(first, pair.data, d.measure))} ({interval_text(d)})"
        for d in sorted(pair.figures, key=lambda d: _SHARES.index(d.measure) if d.measure in _SHARES else len(_SHARES))
    ]
    against = "" if point is first else f", against the point '{first.title}'"
    it = "this point" if point is few else f"the point '{few.title}' of this page"
    sentences = [
        *_saved(few.costs, first.costs, told),
        f"On the {pair.data}{against}, {'; '.join(texts)}." if texts else "",
        f"That is {it}: one shot with corrections, and at most {ASKED_BITS} bits in {_few_where(few, told)}.",
    ]
    at = _asked(told.search)
    if at is not None and told.search is not None and at is not told.search.fewer[0]:
        is_measured = told.measure.name in at.figures
        value = at.figures[told.measure.name] if is_measured else at.value
        before_corrections = BEFORE if (at.uncorrected if is_measured else told.search.uncorrected) else ""
        shares = [(_MEASURES.get(n, n), _figure(n, at.figures[n])) for n in _SHARES if n in at.figures]
        also = "".join(f", its {name} {share}" for name, share in shares)
        sentences.append(
            f"Where bits may differ from edge to edge, the best trial with at most {ASKED_BITS} bits on average "
            f"{MEAN_OF[told.search.fewer_of]} is {at.trial}: its {told.measure.title} is "
            f"{_figure(told.measure.name, value)}{also} on the {at.data if is_measured else 'calibration data'}"
            f"{before_corrections}."
        )
    return " ".join(filter(None, sentences))


def _has_less(few: Point, first: Point) -> bool:
    """Whether few bits save bytes of weights or bit operations."""
    return any(few.costs.get(name, 0.0) < first.costs.get(name, 0.0) for name in ("weight_bytes", "bops"))


def _few_where(few: Point, told: Told) -> str:
    """What of a point with few bits has them: weights, and what they are multiplied with as far as the chip takes as
    few."""
    multiplied = [node for node in few.nodes if node.runs == "integer" and node.costs.get("macs")]
    bits = [edge.bits for node in multiplied for edge in node.edges if edge.kind == "data"]
    if all(each <= ASKED_BITS for each in bits):
        return "all that is multiplied, weights and their inputs"
    if any(each <= ASKED_BITS for each in bits):
        return f"weights, and in their inputs where {told.hardware} takes as few"
    return f"weights (their inputs keep {min(bits)}, since {told.hardware} takes no fewer)"


def _simulated(point: Point, data: str, measure: str) -> float | None:
    """A measure of a point on a data set."""
    verdict = next(each for each in point.verdicts if each.data == data)
    value = verdict.model("simulated").figures.get(measure)
    return value if isinstance(value, (int, float)) else None


def _fewer(told: Told) -> str:
    search, at = told.search, _asked(told.search)
    if search is None or not search.fewer:
        return ""
    most, of = search.fewer[0], MEAN_OF[search.fewer_of]
    if at is None:
        least = search.fewer[-1]
        return (
            f"No trial has {ASKED_BITS} bits or fewer on average {of}; the fewest that were tried are {least.mean:.2f}."
        )
    if at is most:
        return f"Every trial has at most {ASKED_BITS} bits on average {of}."
    value, before = _figure(told.measure.name, at.value), _figure(told.measure.name, most.value)
    before_corrections = BEFORE if search.uncorrected else ""
    sentences = [
        f"Trial {at.trial} has {at.mean:.2f} bits on average {of}, and trial {most.trial} has {most.mean:.2f}.",
        *_saved(at.costs, most.costs, told),
        f"{told.measure.title} is {value} instead of {before} on the calibration data{before_corrections}.",
        *_measured(at, most),
    ]
    return " ".join(sentences)


def _saved(at: Mapping[str, float | None], most: Mapping[str, float | None], told: Told) -> Iterator[str]:
    """What fewer bits save, each in a sentence: packed, as stored, time, and the others that differ.

    Args:
        at, most: costs with fewer bits, and with more.
    """
    sizes = [costs.get(name) for name in ("weight_bytes", STORED) for costs in (at, most)]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes):
        now, before, stored, stored_before = sizes_text(known)
        if stored == stored_before:
            yield (
                f"Nothing that {told.hardware} stores is saved, {stored} both times; packed to their bits, weights "
                f"take {now} instead of {before}."
            )
        else:
            yield (
                f"As {told.hardware} stores them, weights take {stored} instead of {stored_before}; packed to their "
                f"bits, {now} instead of {before}."
            )
    elif sizes[0] is not None and sizes[1] is not None:
        now, before = sizes_text([sizes[0], sizes[1]])
        yield f"Packed to their bits, weights take {now} instead of {before}."
    changes = []
    names = [name for name in ("latency", "cycles", "bops", told.cost) if at.get(name) is not None]
    for name in dict.fromkeys(names):
        after, whole = at[name], most.get(name)
        if name in ("weight_bytes", STORED, "effective_bits") or after is None or not whole:
            continue
        title = {"bops": "bit operations"}.get(name, name.replace("_", " "))
        share = 100 * (after / whole - 1)
        verb = "stays" if name == "latency" else "stay"
        changes.append(f"{title} {f'{verb} the same' if after == whole else f'{share:+.1f} %'}")
    if changes:
        text = ", ".join(changes)
        yield f"{text[0].upper()}{text[1:]}."


def _measured(at: FewerBits, most: FewerBits) -> Iterator[str]:
    """The measure on held-out data of both, where it was measured."""
    if at.to_float is None or not at.data:
        return
    names = [(at, f"trial {at.trial}"), (most, f"trial {most.trial}")]
    texts = [
        f"{_figure('sim_acc', each.figures['sim_acc'])} for {name} ({interval_text(each.to_float)})"
        for each, name in names
        if each.to_float is not None
    ]
    before_corrections = BEFORE if at.uncorrected or most.uncorrected else ""
    yield f"On the {at.data}{before_corrections}, accuracy is {' and '.join(texts)}; differences are to float."


# ---------------------------------------------------------------- layers
def _worst(point: Point) -> str:
    blamed = sorted((n for n in point.nodes if n.blame), key=lambda n: -(n.blame or 0.0))
    if not blamed:
        return ""
    worst, remedies = blamed[0], point.remedies
    gains = {} if remedies is None else remedies.get("kept_float", {})
    why = f": {worst.cause}, since {worst.words}" if worst.words else ""
    others = names_text([f"{n.name} {100 * (n.blame or 0.0):.0f} %{_gain_of(n, gains)}" for n in blamed[1:4]])
    then = f" Then come {others}." if others else ""
    where = f"{100 * (worst.blame or 0.0):.0f} % of the outputs' error by an estimate"
    where += f" on {counted(point.inside_samples, 'sample')}"
    data = point.verdicts[0].data if point.verdicts else "data"
    gain = gains.get(worst.name)
    if _is_known(gain) and gain < _NO_GAIN:
        changes = "changes nothing" if gain > -_NO_GAIN else f"loses {-gain:.1f} dB"
        found = (
            f"Trying contradicts the estimate: keeping {worst.name} ({worst.op}) float {changes}, though it adds "
            f"{where}{why}. Other errors, or corrections of other layers, make up for it."
        )
    else:
        kept = f" Keeping it float gains {gain:.1f} dB, as tried." if _is_known(gain) else ""
        found = f"{worst.name} ({worst.op}) adds {where}{why}.{kept}"
    return f"{found}{then}{_help(worst, remedies, data)}"


def _help(worst: NodeDetail, remedies: Mapping[str, Any] | None, data: str) -> str:
    """What helps, as tried, or what may help where nothing was tried.

    Args:
        data: the name of the data that changes are tried on.
    """
    if remedies is None:
        return f" What may help: {worst.helps}." if worst.helps else ""
    on = f"on the first {counted(remedies['samples'], 'sample')} of the {data}"
    on += _decibels(", whose outputs have {} dB", remedies["sqnr"])
    if not remedies["found"]:
        return f" None of {counted(remedies['tried'], 'change')} that were tried {on}, each quantized anew, helps."
    best = remedies["together"] or remedies["found"][0]
    return f" What helps, as tried {on}: {best['command']}{_decibels(' (gains {} dB)', best['gain_db'])}."


def _gain_of(node: NodeDetail, gains: Mapping[str, float]) -> str:
    """What a node gains when it is kept float, in parentheses; empty where that was not tried."""
    gain = gains.get(node.name)
    return f" (kept float, {round(gain, 1) + 0.0:+.1f} dB)" if _is_known(gain) else ""  # without -0.0


def _decibels(words: str, value: float | None) -> str:
    """Words with a number of dB in them; empty where it is not known."""
    return words.format(f"{value:.1f}") if _is_known(value) else ""


def _floats(point: Point) -> str:
    computed = [node for node in point.nodes if node.runs != "input"]
    floats = [node for node in computed if node.runs == "float"]
    if not floats:
        return f"Yes, all {counted(len(computed), 'node')}." if computed else ""
    ops = Counter(node.op for node in floats)
    most_common = ops.most_common(5)
    more = len(floats) - sum(count for _, count in most_common)
    named = ", ".join([*(f"{count} {op}" for op, count in most_common), *([f"{more} others"] if more else [])])
    text = f"No: {len(floats)} of {counted(len(computed), 'node')} stay float ({named})"
    reasons = Counter(node.reason for node in floats if node.reason).most_common(1)
    text += f"; the most frequent reason is: {reasons[0][0]}." if reasons else "."
    bits = point.costs.get("effective_bits")
    if bits is None or bits <= _MANY_BITS:
        return text
    sizes = {node.name: node.costs.get("weight_bytes", 0.0) for node in floats}
    most = max(sizes, key=lambda name: sizes[name])
    whole = point.costs.get("weight_bytes") or math.inf
    if not sizes[most]:
        return text
    part = (
        f"the node '{most}' alone takes {cost_text('weight_bytes', sizes[most])}, {100 * sizes[most] / whole:.0f} % of "
        "the weights"
    )
    return (
        f"{text} A weight has {bits:.1f} bits on average, above {_MANY_BITS:.0f}, since float weights count 32: {part}."
    )


def _overflow(nodes: Sequence[NodeDetail]) -> str:
    integers = [node for node in nodes if node.runs == "integer"]
    seen = [node for node in integers if node.overflows]
    possible = [node for node in integers if node.verdict != "proved"]
    if seen:
        return f"Yes, it was seen on the data at {names_text([f'{n.name} ({n.overflows} times)' for n in seen])}."
    if possible:
        names = names_text([node.name for node in possible])
        proved = f"{len(integers) - len(possible)} of {len(integers)} integer nodes"
        return f"It is proved absent at {proved}, and possible at {names}."
    if not integers:
        return "No node runs in integers."
    return f"No: it is proved absent for any input at all {len(integers)} integer nodes."
