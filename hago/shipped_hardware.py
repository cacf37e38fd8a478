"""Where the hardware files are that ship with hago; the command line names them in its help without reading one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path


def shipped_hardware() -> Mapping[str, Callable[[], bytes]]:
    """Functions that read the hardware files that ship with hago, by the name of the hardware.

    The files are inside the package if it is installed, and next to it in a checkout.
    """
    installed = resources.files("hago") / "hardware_specs"
    checkout = Path(__file__).resolve().parents[1] / "hardware_specs"
    for folder in (installed, checkout):
        if folder.is_dir():
            paths = sorted((f.name, f) for f in folder.iterdir() if f.name.endswith(".json"))
            return {name.removesuffix(".json"): f.read_bytes for name, f in paths}
    return {}
