"""Confidence intervals of measures over samples: of proportions, of paired differences, and by the jackknife."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _normal_quantile(probability: float) -> float:
    """The value that a standard normal variable stays below with a probability, which is between 0 and 1."""
    from scipy import special  # scipy.stats, which has the same function, takes a second to import

    return float(special.ndtri(probability))


def wilson_interval(successes: float, samples: int, confidence: float = 0.95) -> tuple[float, float]:
    """The confidence interval of a proportion.

    References:
        E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    right, z = round(successes), _normal_quantile(0.5 + 0.5 * confidence)
    share = right / samples
    denominator = 2 * (samples + z**2)
    center = (2 * samples * share + z**2) / denominator
    half = z / denominator * math.sqrt(4 * samples * share * (1 - share) + z**2)
    return 0.0 if right == 0 else center - half, 1.0 if right == samples else center + half


def paired_interval(differences: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean and confidence interval of per-sample differences, by the normal approximation.

    Args:
        differences: (samples,), e.g. 1, 0 or -1 for right in one model and wrong in the other.
    """
    d = differences.to(torch.float64)
    mean = float(d.mean())
    if d.numel() < 2:
        return mean, -math.inf, math.inf
    half = _normal_quantile(0.5 + confidence / 2) * float(d.std()) / math.sqrt(d.numel())
    return mean, mean - half, mean + half


def share_difference(first: Tensor, second: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    """By how much a share of the second model is above that of the first, and the confidence interval of that; zeros
    where no sample differs. It leaves 0 out only if the exact test of McNemar rejects 0, too, which takes six samples.

    Args:
        first, second: (samples,), 1 or 0 for the same samples.

    References:
        D. G. Bonett and R. M. Price, "Adjusted Wald Confidence Interval for a Difference of Binomial Proportions Based
        on Paired Data", Journal of Educational and Behavioral Statistics 2012; Q. McNemar, "Note on the sampling error
        of the difference between correlated proportions or percentages", Psychometrika 1947, here by the binomial
        distribution.
    """
    from scipy import special

    d, n = second.to(torch.float64) - first.to(torch.float64), first.numel() + 2
    won, lost = (int((d == sign).sum()) for sign in (1, -1))
    if not won and not lost:
        return 0.0, 0.0, 0.0
    gain, loss = (won + 1) / n, (lost + 1) / n
    half = _normal_quantile(0.5 + confidence / 2) * math.sqrt((gain + loss - (gain - loss) ** 2) / n)
    low, high = gain - loss - half, gain - loss + half
    if 2 * float(special.bdtr(min(won, lost), won + lost, 0.5)) >= 1 - confidence:
        low, high = min(low, 0.0), max(high, 0.0)
    return float(d.mean()), low, high


def jackknife_interval(
    contributions: Tensor, finish: Callable[[Tensor], float], confidence: float = 0.95
) -> tuple[float, float]:
    """The confidence interval of a value that is a smooth function of mean contributions.

    Args:
        contributions: (samples, k).

    References:
        Tukey, "Bias and confidence in not quite large samples", 1958; Efron and Stein, "The jackknife
        estimate of variance", 1981.
    """
    c = contributions.to(torch.float64)
    n = len(c)
    value = finish(c.mean(0))
    if n < 2:
        return -math.inf, math.inf
    left = torch.tensor([finish(row) for row in (c.sum(0) - c) / (n - 1)], dtype=torch.float64)
    error = math.sqrt((n - 1) / n * float((left - left.mean()).square().sum()))
    half = _normal_quantile(0.5 + confidence / 2) * error
    return value - half, value + half


def quick_interval(
    contributions: Tensor, finish: Callable[[Tensor], float], confidence: float = 0.95
) -> tuple[float, float]:
    """The same to first order, for a few calls of `finish` however many samples there are.

    References:
        Jaeckel, "The infinitesimal jackknife", 1972: every sample moves the value by its contribution times the
        slope at the mean, which is found by differences.
    """
    c = contributions.to(torch.float64)
    mean = c.mean(0)
    if len(c) < 2:
        return -math.inf, math.inf
    steps = torch.diag(1e-4 * torch.maximum(mean.abs(), c.std(0)).clamp_min(1e-30))
    rises = [finish(mean + step) - finish(mean - step) for step in steps]
    slopes = torch.tensor(rises, dtype=torch.float64) / (2 * steps.diagonal())
    error = math.sqrt(float(((c - mean) @ slopes).square().sum()) / (len(c) * (len(c) - 1)))
    half = _normal_quantile(0.5 + confidence / 2) * error
    return (finish(mean) - half, finish(mean) + half) if math.isfinite(half) else (-math.inf, math.inf)


def paired_difference(first: Tensor, second: Tensor, finish: Callable[[Tensor], float]) -> tuple[float, float, float]:
    """By how much a value of the second model is above that of the first, and the confidence interval of that.

    Args:
        first, second: (samples, k), the contributions of the same samples.
        finish: of mean contributions (k,), the value; see `quick_interval`.
    """
    width = first.shape[1]

    def rise(mean: Tensor) -> float:
        return finish(mean[width:]) - finish(mean[:width])

    if torch.equal(first, second):
        return 0.0, 0.0, 0.0
    both = torch.cat([first, second], 1)
    return rise(both.to(torch.float64).mean(0)), *quick_interval(both, rise)
