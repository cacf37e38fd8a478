"""Objectives: how good a simulated model is, against the float model or the labels. Larger is better.

An objective is two pure functions: what each sample contributes, and what the mean contribution
means. So it streams over batches, and two models can be compared sample by sample. Everything else that a
search has to know of an objective (its unit, the side of its limits, how it depends on errors of the outputs) is a
field of it.

`search.evaluate` measures models with objectives; `search.sensitivity` and `search.point_refinement` predict losses
with their curvatures.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from hago.data import Batches, are_whole
from hago.errors import DataError, HagoError, did_you_mean, warn
from hago.serialization.summary import MOST_DB
from hago.serialization.text_table import counted

#: Units of objectives.
Unit = Literal["", "dB", "share"]
#: (reference outputs, outputs, labels) -> (batch, k), float64.
PerSample = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None], Tensor]
#: (outputs, their errors) -> H times the errors, with H as in Curvature; None for outputs that do not matter.
Pull = Callable[[Sequence[Tensor], Sequence[Tensor | None]], list[Tensor | None]]
#: (outputs, labels, generator) -> a vector v for every output, None for outputs that do not matter.
Probe = Callable[[Sequence[Any], Tensor | None, torch.Generator], list[Tensor | None]]


@dataclass(frozen=True, slots=True)
class Curvature:
    """The matrix H of a loss around the float model's outputs: a small error e of the outputs loses e^T H e / 2.

    Searches multiply by it, and by the gradients of the outputs, to predict the loss of a choice of bits before they
    evaluate it.

    Args:
        name: of the loss, as tables of sensitivities print it.
        probe: draws a random vector v with E[v v^T] = H.
        pull: multiplies errors of the outputs by H.
        is_relative: whether losses are divided by the power of the outputs, not by the number of samples.
    """

    name: str
    probe: Probe
    pull: Pull
    is_relative: bool = False


@dataclass(frozen=True, slots=True)
class Objective:
    """A measure of the simulated outputs.

    Args:
        per_sample: what each sample contributes, (batch, k) float64.
        finish: the mean contribution (k,) to the value; larger is better.
        needs_labels: whether labels are read, which must then be classes.
        loss: from contributions, each sample's loss: 0 or more, and its mean orders models as `finish` does,
            the least first; None where there is no such thing.
        unit: of the value: "dB", "share" (at most 1, and limits may be in %), or "" for a plain number.
        is_loss: whether less is better by nature. The value is then the negated loss, and limits are upper ones.
        counts_classes: whether each position of a sample is right or wrong. Few samples then say little of it.
        reported_as: its name in the results of a trial; `name` by default.
        curvature: how it depends on small errors of the outputs. Guided searches fall back to the squared error, with a
            warning, where it is None.
    """

    name: str
    per_sample: PerSample
    finish: Callable[[Tensor], float]
    needs_labels: bool = False
    loss: Callable[[Tensor], Tensor] | None = None
    unit: Unit = ""
    is_loss: bool = False
    counts_classes: bool = False
    reported_as: str = ""
    curvature: Curvature | None = None

    @property
    def figure(self) -> str:
        """Its name in the results of a trial, and in limits."""
        return self.reported_as or self.name

    def text(self, value: float) -> str:
        """The name and a value of it, in words."""
        if self.unit == "share":
            return f"{self.name} {100 * value:.2f} %"
        return f"{self.name} {value:.4g}{' dB' if self.unit == 'dB' else ''}"


def check_rows(outputs: Sequence[Tensor], samples: int) -> None:
    """Refuse outputs that are not one row per sample.

    Raises:
        DataError: an output is not; names it and its shape.
    """
    for slot, output in enumerate(outputs):
        if output.ndim == 0 or output.shape[0] != samples:
            raise DataError(
                f"output {slot} of the model has shape {tuple(output.shape)} for {samples} samples; hago compares "
                "models sample by sample, so axis 0 of every output must be the batch"
            )


def check_numbers(batches: Batches, outputs: Sequence[Sequence[Any]]) -> None:
    """Refuse data on which an output of the float model is NaN, with which nothing can be compared.

    Args:
        outputs: of every batch.

    Raises:
        DataError: names the output and the first such sample.
    """
    first = 0
    for batch, values in zip(batches, outputs, strict=True):
        for slot, value in enumerate(values):
            if not value.is_floating_point():
                continue
            lacks = value.isnan() if value.ndim == 1 else value.isnan().flatten(1).any(1)
            if bool(lacks.any()):
                raise DataError(
                    f"{batches.title}: output {slot} of the model in floats is NaN for sample "
                    f"{first + int(lacks.nonzero()[0, 0])}; leave such samples out, or have the model return numbers"
                )
        first += batch.size


def why_not_finite(name: str, value: float, contributions: Tensor) -> str:
    """What an objective of the user's own returned in place of a finite number, with the first sample that has NaN."""
    lacks = contributions.isnan().flatten(1).any(1)
    first = f", and per_sample is NaN first for sample {int(lacks.nonzero()[0, 0])}" if bool(lacks.any()) else ""
    return f"the objective {name!r} is {value}{first}; expected a finite number"


def class_count(output: Tensor) -> int:
    """How many classes an output chooses among: the size of axis 1."""
    return output.shape[1] if output.ndim > 1 else 1


def why_labels_misfit(labels: Tensor, output: Tensor) -> str:
    """Why labels are not a class for every position of an output, whose classes are on axis 1; empty where they are."""
    count, expected = class_count(output), (*output.shape[:1], *output.shape[2:])
    if count < 2 or tuple(labels.shape) != expected:
        one_hot = count > 1 and labels.shape == output.shape and _is_one_hot(labels)
        return (
            f"labels of shape {tuple(labels.shape)} do not fit outputs of shape {tuple(output.shape)}; "
            f"expected {expected}: one class per position, two classes or more on axis 1 of the output"
            f"{'. They are one-hot: pass labels.argmax(1)' if one_hot else ''}"
        )
    if not are_whole(labels):
        return f"labels of {labels.dtype} that are not whole numbers are no classes; expected 0 to {count - 1}"
    low, high = (int(end) for end in labels.aminmax()) if labels.numel() else (0, 0)
    if low < 0 or high >= count:
        from_one = ". They seem to count from 1: pass labels - 1" if low > 0 and high == count else ""
        return f"labels from {low} to {high} do not fit outputs of {count} classes; expected 0 to {count - 1}{from_one}"
    return ""


def _is_one_hot(labels: Tensor) -> bool:
    """Whether one entry along axis 1 is 1 and the others are 0."""
    return bool(((labels == 0) | (labels == 1)).all()) and bool((labels.sum(1) == 1).all())


def unfit_labels(batches: Batches, outputs: Sequence[Tensor]) -> str:
    """Why the labels of data are no classes of the model's first output; empty where they are, or where no batch has
    any.

    Args:
        outputs: the first output for each batch.
    """
    why = _unfit_labels([batch.labels for batch in batches], outputs)
    return f"{batches.title}: {why}" if why else ""


def _unfit_labels(labels: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> str:
    known = [part for part in labels if part is not None]
    if not known:
        return ""
    if len(known) < len(labels):
        return (
            f"{len(labels) - len(known)} of {len(labels)} batches have no labels; pass them with every batch, or none"
        )
    if any(part.shape[1:] != known[0].shape[1:] for part in known):
        return next(filter(None, map(why_labels_misfit, known, outputs)), "")
    # all batches are checked at once; of outputs, only the shape is read
    rows = sum(len(output) for output in outputs)
    whole, like = torch.cat(known), torch.empty((rows, *outputs[0].shape[1:]), device="meta")
    why = why_labels_misfit(whole, like)
    outside = (whole < 0) | (whole >= class_count(like))
    if not why or whole.ndim != like.ndim - 1 or not bool(outside.any()):
        return why
    return f"{why} (sample {int(outside.nonzero()[0, 0])} is the first outside)"


def warn_of_labels(why: str, instead: str) -> None:
    """Warn that no accuracy is measured although there are labels.

    Args:
        why: what `unfit_labels` says; nothing happens where it is empty.
        instead: what is measured.
    """
    if why:
        warn(f"{why}. Accuracy is not measured, {instead}. Correct the labels, or pass the inputs alone")


def warn_of_numbering(batches: Batches, output: Tensor) -> None:
    """Warn that accuracy may mean nothing where labels are numbers that folders got, but there are fewer or more
    folders than classes, so that the network cannot have been trained with these numbers.

    Args:
        output: the model's first output for one batch.
    """
    names, count = batches.classes, class_count(output)
    if not names or len(names) == count:
        return
    numbered = ", ".join(f"{name} = {label}" for label, name in enumerate(names[:5])) + (", ..." if names[5:] else "")
    warn(
        f"{batches.title} has {counted(len(names), 'folder')} for the {count} classes of the network. Folders are "
        f"numbered in the order of their names ({numbered}), so accuracy means something only if the network has these "
        "numbers for them; else pass labels in an .npz file or by a callable. Pixels are from 0 to 1 before --mean and "
        "--std: give those of the training"
    )


def check_classes(labels: Tensor, output: Tensor) -> None:
    """Refuse labels that are no classes of an output.

    Raises:
        DataError: they are not; says what they are, and what is expected.
    """
    if why := why_labels_misfit(labels, output):
        raise DataError(why)


def _flat(outputs: Sequence[Tensor]) -> Tensor:
    return torch.cat([o.reshape(o.shape[0], -1).to(torch.float64) for o in outputs], 1)


def _flat_pair(reference: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Both as (batch, entries) float64, with 0 where both hold the same infinity, as masked logits do."""
    r, o = _flat(reference), _flat(outputs)
    if math.isfinite(float(r.sum())):
        return r, o
    same = r.isinf() & (r == o)
    return r.masked_fill(same, 0.0), o.masked_fill(same, 0.0)


def _classes(output: Tensor) -> Tensor:
    """(batch, classes, rest...) with classes on axis 1."""
    return output.to(torch.float64) if output.ndim > 1 else output.to(torch.float64).unsqueeze(1)


def _signal_and_noise(reference: Sequence[Tensor], outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
    r, o = _flat_pair(reference, outputs)
    return torch.stack([r.square().sum(1), (r - o).square().sum(1)], 1)


def decibels(signal: float, noise: float) -> float:
    """`10 log10(signal / noise)`, from -MOST_DB to MOST_DB; without signal 0, or MOST_DB without noise either."""
    if signal <= 0.0:
        return MOST_DB if noise <= 0.0 else 0.0
    if math.isinf(noise) or noise >= signal * 10 ** (MOST_DB / 10):
        return -MOST_DB
    if noise <= signal * 10 ** (-MOST_DB / 10):
        return MOST_DB
    return 10.0 * math.log10(signal / noise)


def _kl(reference: Sequence[Tensor], outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
    p = F.log_softmax(_classes(reference[0]), 1)
    q = F.log_softmax(_classes(outputs[0]), 1)
    # the float model excludes a class, or all
    terms = torch.where(p.isneginf() | p.isnan(), 0.0, p.exp() * (p - q))
    return terms.sum(1).reshape(p.shape[0], -1).mean(1, keepdim=True)


def _mse(reference: Sequence[Tensor], outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
    r, o = _flat_pair(reference, outputs)
    return (r - o).square().mean(1, keepdim=True)


def _cosine(reference: Sequence[Tensor], outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
    r, o = _flat_pair(reference, outputs)
    return F.cosine_similarity(r, o, dim=1, eps=1e-30).unsqueeze(1)


def _agreement(reference: Sequence[Tensor], outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
    same = _classes(reference[0]).argmax(1) == _classes(outputs[0]).argmax(1)
    return same.reshape(same.shape[0], -1).to(torch.float64).mean(1, keepdim=True)


def _accuracy(reference: Sequence[Tensor], outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
    if labels is None:
        raise DataError("the accuracy objective needs labels; pass (inputs, labels) batches or objective='sqnr'")
    check_classes(labels, outputs[0])
    right = _classes(outputs[0]).argmax(1) == labels
    return right.reshape(right.shape[0], -1).to(torch.float64).mean(1, keepdim=True)


def _mean(total: Tensor) -> float:
    return float(total[0])


def _negative(total: Tensor) -> float:
    return -float(total[0])


def _last(contributions: Tensor) -> Tensor:
    # what rounding leaves below 0 is 0
    return contributions[:, -1].clamp_min(0.0)


def _missing(contributions: Tensor) -> Tensor:
    return (1.0 - contributions[:, 0]).clamp_min(0.0)


# ---------------------------------------------------------------- curvatures
def _signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    drawn: Tensor = torch.randint(0, 2, list(shape), generator=generator).to(torch.float32)
    return drawn.mul_(2).sub_(1)


def squared_error_probe(
    outputs: Sequence[Any], labels: Tensor | None, generator: torch.Generator
) -> list[Tensor | None]:
    """H = 2 I: the loss is the squared error, summed over all outputs."""
    return [2**0.5 * _signs(o.shape, generator) if o.is_floating_point() else None for o in outputs]


def divergence_probe(outputs: Sequence[Any], labels: Tensor | None, generator: torch.Generator) -> list[Tensor | None]:
    """H = diag(p) - p p^T over axis 1 of the first output, a mean over its other axes."""
    first = outputs[0]
    logits = first if first.ndim > 1 else first.unsqueeze(1)
    p = F.softmax(logits.detach().to(torch.float32), 1)
    root = p.sqrt()
    r = _signs(p.shape, generator)
    v = root * r - p * (root * r).sum(1, keepdim=True)
    return [_over_root_of_positions(v, first), *[None] * (len(outputs) - 1)]


def cross_entropy_probe(
    outputs: Sequence[Any], labels: Tensor | None, generator: torch.Generator
) -> list[Tensor | None]:
    """The gradient of the cross entropy with the labels: the empirical Fisher matrix."""
    if labels is None:
        raise DataError("sensitivity to accuracy needs labels; pass (inputs, labels) batches")
    first = outputs[0]
    check_classes(labels, first)
    logits = first.detach().to(torch.float32)
    hot = F.one_hot(labels.long(), logits.shape[1]).movedim(-1, 1).to(logits.dtype)
    v = (F.softmax(logits, 1) - hot) * _signs((len(logits), *[1] * (logits.ndim - 1)), generator)
    return [_over_root_of_positions(v, first), *[None] * (len(outputs) - 1)]


def squared_error_pull(outputs: Sequence[Tensor], errors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """H = 2 I."""
    return [None if e is None else 2 * e for e in errors]


def divergence_pull(outputs: Sequence[Tensor], errors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """H = diag(p) - p p^T over axis 1 of the first output, a mean over its other axes."""
    first, error = outputs[0], errors[0]
    if error is None:
        return [None] * len(outputs)
    logits, e = (t if t.ndim > 1 else t.unsqueeze(1) for t in (first, error))
    p = F.softmax(logits.to(torch.float32), 1)
    v = p * e - p * (p * e).sum(1, keepdim=True)
    # the mean over positions divides H e by their number, so by the root twice
    return [_over_root_of_positions(_over_root_of_positions(v, first), first), *[None] * (len(outputs) - 1)]


def _over_root_of_positions(v: Tensor, first: Tensor) -> Tensor:
    """`v` divided by the root of the number of positions of an output, in the output's shape and dtype. Divided so, a
    vector v with E[v v^T] = H has the H of a mean over positions."""
    positions = v[0].numel() / max(1, first.shape[1] if first.ndim > 1 else 1)
    return (v / math.sqrt(max(1.0, positions))).reshape(first.shape).to(first.dtype)


#: H = 2 I: the squared error of all outputs.
SQUARED_ERROR: Final = Curvature("squared error", squared_error_probe, squared_error_pull, is_relative=True)
#: H = diag(p) - p p^T: the Kullback-Leibler divergence of class probabilities.
DIVERGENCE: Final = Curvature("divergence", divergence_probe, divergence_pull)
#: With labels, v is the gradient of the cross entropy: the empirical Fisher matrix. Around the float model's own
#: outputs, the matrix of the cross entropy does not depend on the labels: it is that of the divergence.
CROSS_ENTROPY: Final = Curvature("cross entropy", cross_entropy_probe, divergence_pull)


# ---------------------------------------------------------------- the objectives
OBJECTIVES: Final[Mapping[str, Objective]] = {
    o.name: o
    for o in (
        Objective(
            "sqnr",
            _signal_and_noise,
            lambda t: decibels(float(t[0]), float(t[1])),
            loss=_last,
            unit="dB",
            curvature=SQUARED_ERROR,
        ),
        Objective("kl", _kl, _negative, loss=_last, is_loss=True, curvature=DIVERGENCE),
        Objective("mse", _mse, _negative, loss=_last, is_loss=True, curvature=SQUARED_ERROR),
        Objective("cosine", _cosine, _mean, loss=_missing, unit="share", curvature=SQUARED_ERROR),
        Objective(
            "agreement", _agreement, _mean, loss=_missing, unit="share", counts_classes=True, curvature=DIVERGENCE
        ),
        Objective(
            "accuracy",
            _accuracy,
            _mean,
            needs_labels=True,
            loss=_missing,
            unit="share",
            counts_classes=True,
            reported_as="sim_acc",
            curvature=CROSS_ENTROPY,
        ),
    )
}

#: What a user may pass: a name, an Objective, or a function of (reference, outputs, labels).
ObjectiveLike = str | Objective | Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None], float]


def named_objective(spec: ObjectiveLike) -> Objective:
    """The objective that `spec` means. A function is called per batch; its results are averaged over
    samples. What is the user's own gets copies of the tensors, and may change them.

    Raises:
        HagoError: an unknown name, a function of other arguments, or an objective of the user's own that has the name
            of one of hago's, or another unit than those of Unit.
    """
    if isinstance(spec, Objective):
        if OBJECTIVES.get(spec.name) is not spec:
            _check_free(spec.name, spec.figure)
            if spec.unit not in get_args(Unit):
                units = ", ".join(map(repr, get_args(Unit)))
                raise HagoError(f"objective {spec.name!r} has the unit {spec.unit!r}; expected one of {units}")
            if not isinstance(spec.per_sample, (_Called, _OnCopies)):
                own = _OnCopies(spec.name, spec.per_sample)
                return replace(spec, per_sample=own, finish=_Finished(spec.name, spec.finish))
        return spec
    if isinstance(spec, str):
        if spec not in OBJECTIVES:
            raise HagoError(
                f"unknown objective {spec!r}; known: {', '.join(OBJECTIVES)}.{did_you_mean(spec, OBJECTIVES)}"
            )
        return OBJECTIVES[spec]
    if not callable(spec):
        raise HagoError(f"objective {spec!r} is a {type(spec).__name__}; expected a name or a function")
    name = getattr(spec, "__name__", "custom")
    with contextlib.suppress(ValueError):  # some functions of C have no signature
        signature = inspect.signature(spec)
        try:
            signature.bind(None, None, None)
        except TypeError:
            raise HagoError(
                f"objective {name!r} takes {signature}; expected a function of (reference, outputs, labels)"
            ) from None
    _check_free(name, name)
    return Objective(name, _Called(spec), _mean)


def _check_free(name: str, figure: str) -> None:
    """Refuse a name of an objective of the user's own by which logs and limits mean another figure."""
    taken = {"samples", *OBJECTIVES, *(objective.figure for objective in OBJECTIVES.values())}
    for found in (name, figure):
        if found in taken:
            raise HagoError(
                f"an objective of your own has the name {found!r}, which means a figure of hago's own in logs and "
                "limits; give it another name"
            )


def _copies(
    reference: Sequence[Tensor], outputs: Sequence[Tensor], labels: Tensor | None
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Copies for code of the user's, which may work in place; other figures and later trials read the originals."""
    return [t.clone() for t in reference], [t.clone() for t in outputs], None if labels is None else labels.clone()


@dataclass(frozen=True, slots=True)
class _OnCopies:
    """`per_sample` of an objective of the user's."""

    name: str
    function: PerSample

    def __call__(self, reference: Sequence[Tensor], outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        said: Any = self.function(*_copies(reference, outputs, labels))
        if not isinstance(said, Tensor) or said.ndim == 0:
            raise HagoError(
                f"per_sample of objective {self.name!r} returned {said!r}; expected a tensor (samples, k) of float64"
            )
        return said


@dataclass(frozen=True, slots=True)
class _Finished:
    """`finish` of an objective of the user's."""

    name: str
    function: Callable[[Tensor], float]

    def __call__(self, mean: Tensor) -> float:
        said: Any = self.function(mean)
        if not isinstance(said, Real):
            raise HagoError(f"finish of objective {self.name!r} returned {said!r}; expected a number, as of float()")
        return float(said)


@dataclass(frozen=True, slots=True)
class _Called:
    """A function of the user's: one number a batch, as if every sample had given it."""

    function: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None], float]

    def __call__(self, reference: Sequence[Tensor], outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        try:
            said = self.function(*_copies(reference, outputs, labels))
        except HagoError:
            raise
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise HagoError(
                f"the objective function failed in {at.filename}, line {at.lineno}: {type(error).__name__}: {error}"
            ) from error
        try:
            value = float(said)
        except (TypeError, ValueError):
            raise HagoError(f"the objective function returned {said!r}; expected a finite number") from None
        if not math.isfinite(value):
            raise HagoError(f"the objective function returned {value}; expected a finite number")
        return torch.full((outputs[0].shape[0], 1), value, dtype=torch.float64)
