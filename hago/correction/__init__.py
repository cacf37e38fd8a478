"""Corrections: what post-training methods change in a network before it is quantized, as values that are stored.

A strategy holds its `Corrections`, by which the network that it was made for becomes the one that it quantizes. They
are found by `hago.search`.
"""

from hago.correction.absorption import Passage, Shifts, shiftable
from hago.correction.channels import FIXED, LAYERS, Channels, Scalable, channel_axis, track_channels
from hago.correction.corrections import Corrections
from hago.correction.equalization import STEPS_PER_OCTAVE, steps_by_node
from hago.correction.offsets import OffsetConstants
from hago.correction.passes import CorrectionPass, WhyNot, passes_from_json
from hago.correction.rotation import Rotatable, find_rotatable
from hago.correction.splitting import Chain, Splits, chains_of, name_apart, norms_to_separate

__all__ = [
    "FIXED",
    "LAYERS",
    "STEPS_PER_OCTAVE",
    "Chain",
    "Channels",
    "CorrectionPass",
    "Corrections",
    "OffsetConstants",
    "Passage",
    "Rotatable",
    "Scalable",
    "Shifts",
    "Splits",
    "WhyNot",
    "chains_of",
    "channel_axis",
    "find_rotatable",
    "name_apart",
    "norms_to_separate",
    "passes_from_json",
    "shiftable",
    "steps_by_node",
    "track_channels",
]
