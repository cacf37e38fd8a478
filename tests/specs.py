"""The hardware that laws run over, read once: what ships, and the chips made up."""

from __future__ import annotations

from typing import Final

from chips import CHIPS

from hago.hardware.file import available_hardware, load_hardware

SHIPPED: Final = {name: load_hardware(name) for name in available_hardware()}
MADE_UP: Final = {name: chip.hardware(name=name) for name, chip in CHIPS.items()}
EVERY: Final = {**SHIPPED, **MADE_UP}
