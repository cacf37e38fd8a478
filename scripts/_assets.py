"""The networks that are measured, each with its calibration samples, its test samples and its metric.

The folder that is given as `--assets` has `loaders.py` (see its README), which loads weights and data that are not part
of this project. Calibration and test samples are disjoint, and their choice is fixed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from hago.search.objective import decibels

NAMES = (
    "cifar_resnet20",
    "cifar_resnet32",
    "squeezenet1_1",
    "mobilenetv2_cifar96",
    "mlperf_resnet8",
    "mlperf_kws",
    "mlperf_ad",
    "lenet",
    "minilm",
)
_SEED = 20190101
#: Samples of one forward pass.
BATCH = 32
#: Sound files that the autoencoder is calibrated on.
FILES = 12

Samples = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Asset:
    """A network with its data.

    Args:
        calibration: batches of inputs, without labels.
        test: batches of inputs, disjoint from `calibration`.
        labels: (samples,) of the test samples if the metric is top-1; else None.
        metric: name of the metric.
        score: computes the metric from the outputs of all test samples; larger is better.
        kinds: by name, bool (samples,), the test samples whose SQNR is reported apart; empty if all are of one kind.
        placements: if the metric is an area under a curve, computes the placements of cases and of controls from the
            outputs of all test samples; see `area_difference`.
        recording: number of consecutive test samples that are of one recording, and therefore alike.
    """

    name: str
    module: nn.Module
    calibration: list[Samples]
    test: list[Samples]
    labels: Tensor | None
    metric: str
    score: Callable[[Tensor], float]
    kinds: Mapping[str, Tensor] = field(default_factory=dict)
    placements: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    recording: int = 1

    @property
    def samples(self) -> int:
        """The number of test samples."""
        return sum(len(batch[0]) for batch in self.test)


def load(folder: str | Path, name: str, calibration: int = 512, test: int | None = None) -> Asset:
    """Load one network with at most `calibration` and `test` samples."""
    path = str(Path(folder).resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
    loaders = importlib.import_module("loaders")
    module, prepare = loaders.net(name)
    if name == "minilm":
        return _text(module, loaders.text(), calibration, test)
    if name == "mlperf_ad":
        return _anomaly(module, loaders, calibration, test)
    known, unseen, labels = _images(loaders, name, calibration, test)
    return Asset(
        name,
        module,
        _batches(prepare(known)),
        [tuple(prepare(part) for part in batch) for batch in _batches(unseen)],
        labels,
        "top-1",
        lambda outputs: float((outputs.argmax(1) == labels).double().mean()),
    )


def area_difference(
    ours: Sequence[Tensor], other: Sequence[Tensor], confidence: float = 0.95
) -> tuple[float, float, float]:
    """The difference of two areas under curves of the same samples, and its confidence interval.

    Args:
        ours, other: placements: for each case the share of controls that score lower, for each control the share of
            cases that score higher, float64.

    References:
        E. DeLong et al., "Comparing the Areas under Two or More Correlated Receiver Operating Characteristic Curves",
        Biometrics 1988.
    """
    differences = [a - b for a, b in zip(ours, other, strict=True)]
    half = float(stats.norm.ppf(0.5 + confidence / 2)) * sum(float(d.var()) / len(d) for d in differences) ** 0.5
    mean = float(differences[0].mean())
    return mean, mean - half, mean + half


def outputs(model: Callable[..., Any], batches: Sequence[Samples]) -> Tensor:
    """A model's outputs for all samples."""
    with torch.no_grad():
        return torch.cat([model(*batch) for batch in batches])


def sqnr(reference: Tensor, out: Tensor) -> float:
    """The SQNR of outputs against those of the float model, of all samples together, in dB."""
    noise = float((out.double() - reference.double()).square().sum())
    return decibels(float(reference.double().square().sum()), noise)


def _batches(*tensors: Tensor) -> list[Samples]:
    return list(zip(*(t.split(BATCH) for t in tensors), strict=True))


def _chosen(total: int, count: int | None) -> Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(_SEED))[:count]


def _images(loaders: Any, name: str, calibration: int, test: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """(calibration samples, test samples, test labels)."""
    if name == "squeezenet1_1":
        known, (x, y) = loaders.imagenet(part="sample")[0], loaders.imagenet(part="val")
    elif name in ("lenet", "mlperf_kws"):
        x, y = loaders.mnist() if name == "lenet" else loaders.kws()
        cut = min(calibration, len(x) // 4)
        order = _chosen(len(x), None)
        known, x, y = x[order[:cut]], x[order[cut:]], y[order[cut:]]
    else:
        known, (x, y) = loaders.cifar10(part="calib")[0], loaders.cifar10(part="jpeg")
    index = _chosen(len(x), test)
    return known[_chosen(len(known), calibration)], x[index], y[index]


def _anomaly(module: nn.Module, loaders: Any, calibration: int, test: int | None) -> Asset:
    """The autoencoder: calibrated on windows of sound files without anomalies, tested on at most `test` other files."""
    files, anomalous, _ = loaders.anomaly()
    windows = torch.stack([loaders.anomaly_windows(file) for file in files])
    normal = (anomalous == 0).nonzero().flatten()
    used = normal[_chosen(len(normal), FILES)]
    rest = torch.tensor([i for i in range(len(files)) if i not in set(used.tolist())])
    rest = rest[_chosen(len(rest), test)]
    unseen = windows[rest].flatten(0, 1)
    # windows of one file are alike: a file is a batch
    parts = _chosen(windows.shape[1], max(1, calibration // FILES)).sort().values
    strange = anomalous[rest].repeat_interleave(windows.shape[1])

    def placements(out: Tensor) -> tuple[Tensor, Tensor]:
        error = (out - unseen).square().mean(1).view(len(rest), -1).mean(1)
        bad, good = error[anomalous[rest] == 1], error[anomalous[rest] == 0]
        above = (bad[:, None] > good).double() + (bad[:, None] == good).double() / 2
        return above.mean(1), above.mean(0)

    return Asset(
        "mlperf_ad",
        module,
        [(file[parts],) for file in windows[used]],
        [(part,) for part in unseen.split(8 * BATCH)],
        None,
        "AUC",
        lambda out: float(placements(out)[0].mean()),
        {name: strange == kind for kind, name in enumerate(("normal test samples", "anomalies"))},
        placements,
        windows.shape[1],
    )


def _text(module: nn.Module, text: dict[str, Tensor], calibration: int, test: int | None) -> Asset:
    """The sentence encoder: calibrated on words of SimLex-999 that WordSim-353, the test, does not have."""
    first, second = text["wordsim_a"].long()[:test], text["wordsim_b"].long()[:test]
    human = text["wordsim_human"][:test]
    tested = {tuple(row) for row in torch.cat([first, second]).tolist()}
    rows = dict.fromkeys(map(tuple, torch.cat([text["simlex_a"], text["simlex_b"]]).tolist()))
    known = torch.tensor([row for row in rows if row not in tested])
    known, unseen = known[_chosen(len(known), calibration)], torch.cat([first, second])

    def rank_correlation(out: Tensor) -> float:
        a, b = out.chunk(2)
        return float(stats.spearmanr((a * b).sum(1), human).statistic)

    calibrated, tried = (_batches(ids, (ids != 0).long()) for ids in (known, unseen))
    return Asset("minilm", module, calibrated, tried, None, "Spearman", rank_correlation)
