"""Measuring: what a CPU's signatures take on the machine that this runs on, as figures of its hardware file.

Every signature is timed on an op that lists it: in integers by the kernels that run integer models here, in float
by torch's. A size that caches hold gives its throughput, one that they do not hold the bandwidth of memory.

Invariant: only figures of cost, the name, sources and notes differ from the hardware that was given; a figure that
cannot be measured here stays as it was, and a note says why.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch

from hago.debug.text import table
from hago.errors import HardwareError
from hago.hardware import Hardware
from hago.hardware_document import from_document, to_document
from hago.hardware_file import check_hardware
from hago.measuring.timing import Job, copy_job, fastest, requantize_job, signature_jobs
from hago.prepare import HardwareLike, as_hardware
from hago.search.header import versions

#: The clock where neither the system nor the file names one: a cycle is a nanosecond.
NOMINAL_HZ: Final = 1e9
#: The families that `platform.machine()` names.
_FAMILIES: Final = {"x86_64": "x86", "amd64": "x86", "i686": "x86", "aarch64": "arm", "arm64": "arm"}
_CHIP: Final = "chip"
_MEASURED: Final = "_measured"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of cost.

    Args:
        of: a signature, or "chip".
        key: its name in the file.
        before, now: in the file that was given and in the copy; None where it is not given.
        said: what was timed, or why nothing was.
    """

    of: str
    key: str
    before: float | None
    now: float | None
    said: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured copy of a hardware, and its figures one by one; prints as a table."""

    hardware: Hardware
    figures: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        name, source = self.hardware.name, self.hardware.sources[-1]
        return {"name": name, "source": source, "figures": [asdict(f) for f in self.figures]}

    def __str__(self) -> str:
        rows = [(f.of, f.key, _short(f.before), _short(f.now), f.said) for f in self.figures]
        titles = ("of", "figure", "before", "now", "timed")
        return "\n".join([f"{self.hardware.name}: {self.hardware.sources[-1]}", *table(titles, rows)])


def measure_hardware(hardware: HardwareLike) -> Measurement:
    """Time what a CPU's hardware file lists, on as many threads as torch is set to.

    Returns:
        A copy called `<name>_measured`, in which `macs_per_cycle` and `elements_per_cycle` of signatures,
        `requantize_per_cycle`, `bytes_per_cycle`, `clock_hz` and `cores` (the threads) are those of this machine.

    Raises:
        HardwareError: not of a CPU, or of one of another family than this machine's.
    """
    given = as_hardware(hardware)
    check_processor(given)
    document = to_document(given)
    small: dict[tuple[str, str], Job] = {}
    large = [copy_job()]
    reasons: dict[tuple[str, str], str] = {}
    for name, key, found in signature_jobs(from_document(document, given.origin, given.known_ops)):
        if isinstance(found, str):
            reasons[name, key] = found
        else:
            small[name, key] = found[0]
            large.append(found[1])
    again = requantize_job(given)
    if isinstance(again, str):
        reasons[_CHIP, "requantize_per_cycle"] = again
    else:
        small[_CHIP, "requantize_per_cycle"] = again
    seconds = fastest([*small.values(), *large])
    rates = {k: (job.work / s, job.said) for (k, job), s in zip(small.items(), seconds, strict=False)}
    moving = [(job.moved / s, job.said) for job, s in zip(large, seconds[len(small) :], strict=True)]
    figures = tuple(_figures(document, rates, moving, reasons))
    return Measurement(_copy(document, given, figures), figures)


def check_processor(hardware: Hardware) -> None:
    """Refuse what cannot be timed on this machine.

    Raises:
        HardwareError: not of a CPU, or of one of another family.
    """
    here = _FAMILIES.get(platform.machine().lower(), platform.machine())
    if not hardware.processor:
        raise HardwareError(
            f"hardware {hardware.name!r} is not said to be a CPU that hago runs on, so it cannot be timed here; the "
            'file of one says "processor": "x86", "arm", or "cpu" for any'
        )
    if hardware.processor not in ("cpu", here):
        raise HardwareError(
            f"hardware {hardware.name!r} is of an {hardware.processor} CPU, and this machine's is {here}; measure it "
            "on such a machine"
        )


def _figures(
    document: Mapping[str, Any],
    rates: Mapping[tuple[str, str], tuple[float, str]],
    moving: list[tuple[float, str]],
    reasons: Mapping[tuple[str, str], str],
) -> list[Figure]:
    """Rates a second as figures of a cycle, of one core where they are so in the file."""
    chip = document.get("cost", {})
    clock, whence = _clock_hz(chip)
    threads = torch.get_num_threads()
    found = [
        Figure(_CHIP, "clock_hz", chip.get("clock_hz"), clock, whence),
        Figure(_CHIP, "cores", chip.get("cores"), threads, "threads that were used"),
    ]

    def before(of: str, key: str) -> float | None:
        figure: float | None = (chip if of == _CHIP else document["signatures"][of]).get(key)
        return figure

    rate, said = max(moving)
    now, said = rate / clock, f"{rate / 1e9:.4g} GB/s: {said}"
    found.append(Figure(_CHIP, "bytes_per_cycle", before(_CHIP, "bytes_per_cycle"), now, said))
    for (of, key), (rate, said) in rates.items():
        text = f"{rate / 1e9:.4g} G/s: {said}"
        found.append(Figure(of, key, before(of, key), rate / clock / threads, text))
    for (of, key), why in reasons.items():
        found.append(Figure(of, key, before(of, key), before(of, key), f"not measured: {why}"))
    return found


def _copy(document: Mapping[str, Any], given: Hardware, figures: tuple[Figure, ...]) -> Hardware:
    chip = dict(document.get("cost", {}))
    signatures = {name: dict(body) for name, body in document["signatures"].items()}
    for figure in figures:
        if figure.now is not None:
            (chip if figure.of == _CHIP else signatures[figure.of])[figure.key] = figure.now
    made = versions(torch.get_num_threads())
    del made["machine"], made["threads"]
    source = (
        f"measured by hago hardware measure on {_machine()}, {datetime.now(timezone.utc):%Y-%m-%d}, "
        f"{torch.get_num_threads()} threads, {', '.join(f'{k} {v}' for k, v in made.items())}"
    )
    notes = [f"{f.of}, {f.key}: {f.said}." for f in figures]
    copy = from_document(
        {
            **document,
            "name": given.name.removesuffix(_MEASURED) + _MEASURED,
            "sources": [*given.sources, source],
            "notes": [*given.notes, *notes],
            "signatures": signatures,
            "cost": chip,
        },
        "",
        given.known_ops,
    )
    check_hardware(copy)
    return copy


def _clock_hz(chip: Mapping[str, float]) -> tuple[float, str]:
    """Of this machine, where the system says it, and who says it."""
    for line in _cpu_lines():
        key, _, value = line.partition(":")
        if key.strip() == "cpu MHz":
            return float(value) * 1e6, "as the system says"
    if "clock_hz" in chip:
        return chip["clock_hz"], "as it was: the system does not say"
    return NOMINAL_HZ, "a cycle is taken as a nanosecond: the system does not say"


def _machine() -> str:
    """The processor's name, where the system says it, and its architecture."""
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.machine()


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return []


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
