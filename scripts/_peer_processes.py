"""Peers in environments of their own: how they are installed, and how their processes are given their data.

The script of a peer reads and writes the files that `_peer_points.py` names. An environment is a folder that is used
again if it exists.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _assets import Asset, outputs

HERE = Path(__file__).resolve().parent
#: The build that all of them can be installed beside.
TORCH = "torch==2.13.0"

MODELOPT = ("nvidia-modelopt==0.47.0", "requests", "huggingface_hub")
NNCF = ("nncf==3.4.0", "openvino==2026.4.1")
AIMET = ("aimet-torch==2.42.0",)


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer: its environment and the packages in it, and its script with further arguments (`told`)."""

    name: str
    environment: str
    packages: tuple[str, ...]
    script: str
    told: tuple[str, ...] = ()


def run_peer(peer: Peer, environments: Path, folder: Path, asset: Asset, assets: str, threads: int) -> str:
    """Install a peer if it is not there yet, and run its script; returns the reason if either failed, else "".

    Args:
        environments: the folder of the environments of all peers.
        folder: where its data go, and what it writes.
        assets: the folder of pretrained networks.
    """
    python = environments.resolve() / peer.environment / "bin" / "python"
    said = "" if python.exists() else install(python.parent.parent, peer.packages)
    return said or run_script(str(python), peer.script, folder, asset, assets, threads, peer.told)


def run_script(
    python: str, script: str, folder: Path, asset: Asset, assets: str, threads: int, told: Sequence[str]
) -> str:
    """Run a script on the data of a network; returns the reason if it failed, else an empty string."""
    np.save(folder / "calibration.npy", torch.cat([batch[0] for batch in asset.calibration]).numpy())
    np.save(folder / "held_out.npy", torch.cat([batch[0] for batch in asset.test]).numpy())
    # calibration has no labels; peers that need some get the classes of the float model
    np.save(folder / "labels.npy", outputs(asset.module, asset.calibration).argmax(1).numpy())
    command = [python, str(HERE / script), str(folder), str(Path(assets).resolve()), asset.name, str(threads)]
    ran = subprocess.run([*command, *told], capture_output=True, text=True, check=False)
    return "" if ran.returncode == 0 else last_line(ran.stderr)


def install(folder: Path, packages: Sequence[str]) -> str:
    """Make an environment; returns the reason if that failed, else an empty string."""
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", TORCH, "numpy", "pillow", *packages],
    ):
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            return f"could not be installed: {last_line(ran.stderr)}"
    return ""


def last_line(text: str) -> str:
    """The last line of a traceback, which says what went wrong."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]
