"""Descriptions of a search, for its strategies and for the header of its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import torch

from hago.calibration import BINS, dorefa_of
from hago.hardware import hardware_hash
from hago.plan import HardwareId
from hago.search.continuation import MERGED_GROUPS, TRACED_FEEDS
from hago.search.preparation import Prepared
from hago.search.safe_bits import feeds_behind
from hago.search.scoring import GoalScorer
from hago.searchers import SEARCHERS
from hago.study import Header, Searcher, make_header

#: Parts of a description that the header of a log has elsewhere, or not at all.
NOT_IN_HEADER: Final = frozenset(
    {
        "searcher",
        "goal",
        "race",
        "estimated",
        "topology",
        "weights",
        "refined",
        "confirmed",
        "corrections",
        "passes",
        "effort",
    }
)
#: Keys of the record of refined thresholds that say how they are refined; the others are measurements.
_SETTINGS: Final = ("kept_aside", "turns", "blind", "forwards", "chunk", "refines_weights", "one_shot")


def description(
    scorer: GoalScorer, searcher: Searcher, seed: int, search_topology: bool, effort: Mapping[str, Any]
) -> dict[str, Any]:
    """The `made_by` of a search's strategies, without their figures; the header of its log repeats most of it.

    Args:
        effort: what it stood for, as JSON values; none of logs that do not say.
    """
    prepared, goal, race = scorer.prepared, scorer.goal, scorer.race
    how = made_by(prepared, goal.objective.name, seed)
    if effort:
        how["effort"] = dict(effort)
    how |= {"searcher": {"name": searcher.name, "options": dict(searcher.options)}}
    if goal.to_json():
        how["goal"] = goal.to_json()
    if search_topology:
        how["topology"] = "searched"
    if prepared.refinement_record is True:
        how["refined"] = True
    elif prepared.refinement_record:
        how["refined"] = {k: v for k, v in prepared.refinement_record.items() if k in _SETTINGS}
        how["confirmed"] = {k: v for k, v in prepared.refinement_record.items() if k not in _SETTINGS}
    if race is not None:
        how["race"] = asdict(race)
    return how


def made_by(prepared: Prepared, objective: str, seed: int) -> dict[str, Any]:
    """The parts of a strategy's `made_by` that searches, one-shot quantization and training share."""
    return {
        "estimator": prepared.estimator.name,
        "objective": objective,
        "seed": seed,
        "keep_float": list(prepared.keep_float),
        "fix_bits": dict(prepared.fix_bits),
        "data_hash": prepared.batches.sha256,
        **({"corrections": list(prepared.correction_names)} if prepared.correction_names else {}),
        **passes_record(prepared),
        **({} if (weights := dorefa_of(prepared.estimator)) is None else {"weights": weights}),
        **({"estimated": list(prepared.without_row)} if prepared.calibration.given.gives_ranges else {}),
    }


def passes_record(prepared: Prepared) -> dict[str, Any]:
    """What the passes of corrections gained, as an entry of `made_by` and of a log's header; empty without any."""
    return {"passes": [each.to_json() for each in prepared.passes]} if prepared.passes else {}


def header_of(prepared: Prepared, searcher: Searcher, how: Mapping[str, Any]) -> Header:
    """The header of a search's log.

    Args:
        how: of `description`.
    """
    named_parts = {k: v for k, v in how.items() if k not in NOT_IN_HEADER}
    hardware = HardwareId(prepared.hardware.name, hardware_hash(prepared.hardware))
    given, names, passes = prepared.calibration.given, prepared.correction_names, passes_record(prepared)
    return make_header(
        prepared.space,
        searcher,
        model_hash=prepared.graph.model_hash,
        hardware=hardware,
        threads=torch.get_num_threads(),
        settings={
            **how.get("goal", {}),
            **{k: how[k] for k in ("race", "topology", "refined", "effort") if k in how},
            **({"thresholds": given.to_json()} if given.gives_ranges else {}),
            **({"corrections": {"names": list(names), **prepared.corrections.to_json(), **passes}} if names else {}),
            **({"channel_bins": bins} if (bins := prepared.calibration.channel_bins) != BINS else {}),
            **({"softmax_span": prepared.calibration.softmax_span} if prepared.calibration.cut else {}),
            **({MERGED_GROUPS: True} if prepared.merges_groups and _is_guided(searcher) else {}),
            **({TRACED_FEEDS: True} if feeds_behind(prepared) else {}),
        },
        confirmed=how.get("confirmed"),
        **named_parts,
    )


def _is_guided(searcher: Searcher) -> bool:
    """Whether it is a searcher of hago's own that asks what integer programs find."""
    return searcher.name in SEARCHERS and SEARCHERS[searcher.name].guided
