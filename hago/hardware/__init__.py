"""Hardware: the operators, dtypes and arithmetic of a chip, hardware files and their checks, and a printed table."""

from hago.hardware.common_ops import COMMON_OPS, MissingOps, missing_common_ops
from hago.hardware.file import (
    available_hardware,
    check_hardware,
    hardware_from_document,
    hardware_hash,
    hardware_to_document,
    load_hardware,
    save_hardware,
)
from hago.hardware.hardware import Accumulator, FixedOut, Groups, Hardware, OpDesc, TensorScheme, create_sample_hardware
from hago.hardware.start import start_hardware
from hago.hardware.table import HardwareTable
from hago.hardware.validation import check_hardware_document

__all__ = [
    "COMMON_OPS",
    "Accumulator",
    "FixedOut",
    "Groups",
    "Hardware",
    "HardwareTable",
    "MissingOps",
    "OpDesc",
    "TensorScheme",
    "available_hardware",
    "check_hardware",
    "check_hardware_document",
    "create_sample_hardware",
    "hardware_from_document",
    "hardware_hash",
    "hardware_to_document",
    "load_hardware",
    "missing_common_ops",
    "save_hardware",
    "start_hardware",
]
