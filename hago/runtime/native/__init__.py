"""The integer model on the fastest kernels that are exact on this machine: selection, lowering, code and execution."""

from hago.runtime.native.allocator import keep_freed_memory
from hago.runtime.native.build import cache_folder, find_compiler
from hago.runtime.native.executor import ENGINES, Executor, NativeIntegerModel, named_engine
from hago.runtime.native.instruction_sets import machine
from hago.runtime.native.lowering import conversion
from hago.runtime.native.processor import cpu_lines, processor_flags, processor_name
from hago.runtime.native.self_test import ExactKernels, exact_kernels
from hago.runtime.native.weights import KernelConstantCache

__all__ = [
    "ENGINES",
    "ExactKernels",
    "Executor",
    "KernelConstantCache",
    "NativeIntegerModel",
    "cache_folder",
    "conversion",
    "cpu_lines",
    "exact_kernels",
    "find_compiler",
    "keep_freed_memory",
    "machine",
    "named_engine",
    "processor_flags",
    "processor_name",
]
