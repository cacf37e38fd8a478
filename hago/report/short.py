"""The answers to what readers of a report ask first: what was lost, what fewer bits cost, which layer hurts, whether
anything can overflow, and how it is done again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hago.cost import METRICS, amount_text
from hago.report.document import Command, Figure, InShort, NodeDetail, PairedFigure, SearchStory, Verdict
from hago.serialization.summary import measure_text, names_text
from hago.serialization.text_table import counted

#: The bits that the answer on fewer bits is about, where the log has them.
ASKED_BITS: Final = 6
#: What means of bits are over, in words.
MEAN_OF: Final = {"weights": "over all weights", "edges": "over the edges whose bits the search varied"}


def answers(
    verdicts: Sequence[Verdict],
    costs: Mapping[str, float],
    float_costs: Mapping[str, float],
    nodes: Sequence[NodeDetail],
    remedies: Mapping[str, Any] | None,
    search: SearchStory | None,
    measure: Figure,
    cost: str,
    commands: Sequence[Command],
) -> tuple[InShort, ...]:
    """The answers for one point.

    Args:
        cost: the cost of the front.
    """
    asked = (
        ("What does it give, and what does it lose?", _lost(verdicts, costs, float_costs)),
        (f"What does it cost to go to {ASKED_BITS} bits?", _fewer(search, measure, cost)),
        ("Which layer loses most, and why?", _worst(nodes, remedies)),
        ("Can anything overflow?", _overflow(nodes)),
        ("How is it done again?", commands[0].line if commands else ""),
    )
    return tuple(InShort(question, answer) for question, answer in asked if answer)


def _lost(verdicts: Sequence[Verdict], costs: Mapping[str, float], float_costs: Mapping[str, float]) -> str:
    sentences = []
    if verdicts:
        verdict = verdicts[-1]  # held-out data where there is some
        sentences.append(_on_data(verdict))
    size, whole = costs.get("weight_bytes"), float_costs.get("weight_bytes")
    if size is not None and whole:
        texts = amount_text("weight_bytes", size), amount_text("weight_bytes", whole)
        part = f"{100 * size / whole:.0f} % of the float model's"
        sentences.append(f"Weights take {texts[0]} instead of {texts[1]}, {part}.")
    return " ".join(sentences)


def _on_data(verdict: Verdict) -> str:
    figures = {model.name: model.figures for model in verdict.models}
    before, after = figures["float"], figures["simulated"]
    paired = next((d for d in verdict.differences if d.first == "float" and d.measure == "sim_acc"), None)
    where = f"On the {verdict.data} ({counted(int(after['samples']), 'sample')})"
    sqnr = f"the outputs have an SQNR of {measure_text('sqnr', after['sqnr'])}"
    if "sim_acc" not in after or paired is None:
        agreement = f", and {100 * after['agreement']:.2f} % of the decisions agree" if "agreement" in after else ""
        return f"{where}, {sqnr}{agreement}."
    return (
        f"{where}, accuracy is {measure_text('sim_acc', after['sim_acc'])} instead of "
        f"{measure_text('sim_acc', before['sim_acc'])} in float ({interval_text(paired)}); {sqnr}."
    )


def interval_text(paired: PairedFigure) -> str:
    """The difference of a share with its interval, in points."""
    if paired.difference is None:
        return "not measured"
    if paired.low is None or paired.high is None:
        return f"{100 * paired.difference:+.2f} points"
    if paired.low == paired.high == 0.0:
        return "the same on every sample"
    chance = "" if paired.better else ", which may be chance"
    low, high = 100 * paired.low, 100 * paired.high
    return f"{100 * paired.difference:+.2f} points, with 95 % confidence {low:+.2f} to {high:+.2f}{chance}"


def _fewer(search: SearchStory | None, measure: Figure, cost: str) -> str:
    if search is None or not search.fewer:
        return ""
    most, of = search.fewer[0], MEAN_OF[search.fewer_of]
    at = next((each for each in search.fewer if each.bits == ASKED_BITS), None)
    if at is None:
        least = search.fewer[-1]
        return (
            f"No trial has {ASKED_BITS} bits or fewer on average {of}; the fewest that were tried are {least.mean:.2f}."
        )
    if at.value is None or most.value is None:
        return ""
    value, before = measure_text(measure.name, at.value), measure_text(measure.name, most.value)
    paid = _amounts(cost, at.costs.get(cost), most.costs.get(cost))
    return (
        f"With at most {ASKED_BITS} bits on average {of}, {measure.title} is {value} instead of {before} with "
        f"{most.mean:.1f} bits{f', and {paid}' if paid else ''}: trial {at.trial}, on the calibration data."
    )


def _amounts(cost: str, now: float | None, before: float | None) -> str:
    if now is None or not before or cost not in METRICS:
        return ""
    words = cost.replace("_", " ").replace("weight bytes", "the weights take")
    verb = words if words.endswith("take") else f"{words} are"
    return f"{verb} {amount_text(cost, now)} instead of {amount_text(cost, before)}"


def _worst(nodes: Sequence[NodeDetail], remedies: Mapping[str, Any] | None) -> str:
    blamed = sorted((n for n in nodes if n.blame), key=lambda n: -(n.blame or 0.0))
    if not blamed:
        return ""
    worst = blamed[0]
    why = f": {worst.cause}, since {worst.words}" if worst.words else ""
    others = names_text([f"{n.name} {100 * (n.blame or 0.0):.0f} %" for n in blamed[1:4]])
    then = f" Then come {others}." if others else ""
    adds = f"{worst.name} ({worst.op}) adds {100 * (worst.blame or 0.0):.0f} % of the outputs' error{why}."
    return f"{adds}{then}{_help(worst, remedies)}"


def _help(worst: NodeDetail, remedies: Mapping[str, Any] | None) -> str:
    if remedies is None:
        return f" What may help: {worst.helps}." if worst.helps else ""
    if not remedies["found"]:
        return f" None of {counted(remedies['tried'], 'change')} that were tried helps."
    best = remedies["together"] or remedies["found"][0]
    return f" What helps, as tried: {best['command']} (gains {best['gain_db']:.1f} dB)."


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
