"""The kernels for processors that this machine does not have.

Those for NEON are compiled by a cross compiler and run in an emulator. Those for AVX-VNNI, AVX-512 and AMX run on any
x86 with AVX2, with their intrinsics in plain C++ (emulated_x86.h). Products of bytes and of words also run on plain
vectors, and AVX2 as it is. All but NEON run under the address sanitizer. What the compiler makes of each set of x86 is
disassembled. Where a tool or a processor is missing, the test is skipped and says which.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.types import INT32, ZERO, QParams
from hago.runtime.native import build
from hago.runtime.native import library as native
from hago.runtime.native.calls import conv_call
from hago.runtime.native.epilogue import Epilogue, StoredOutput
from hago.runtime.native.instruction_sets import INSTRUCTION_SETS
from hago.runtime.native.processor import processor_flags
from hago.runtime.native.requantize import AS_IS
from hago.runtime.native.weights import Geometry, pack_for

from .emulated_sets import EMULATES, emulating_options, write_emulating

SUMS: Final = QParams(torch.ones((), dtype=torch.float64), ZERO, INT32.min, INT32.max, INT32)
ARM: Final = "aarch64-linux-gnu-g++"
EMULATOR: Final = "qemu-aarch64-static"
X86: Final = ("c++", "objdump")


#: The files of convolutions.
PARTS: Final = ("conv", "depthwise", "fours", "quick_sums", "rows", "tiles", "winograd")
#: What reads or writes outside of an array ends the program. Checks that are calls, not code in place, and no names of
#: lines for the debugger, compile in a third of the time.
SANITIZED: Final = ("-fsanitize=address", "--param", "asan-instrumentation-with-call-threshold=0")


@dataclass(frozen=True)
class Target:
    """A processor: the compiler with its options, the command that runs programs, what the system says of a processor
    that runs them without one, and the instruction set that is emulated."""

    compiler: tuple[str, ...]
    run: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    emulates: str = ""


#: Instruction sets, files, and an instruction that these must have for those.
BUILT: Final = (
    ("AVX2", "conv", "vpmaddwd"),
    ("AVX2", "fours", "vpmaddubsw"),
    ("AVX2", "winograd", "vpmaddwd"),
    ("AVX2_VNNI", "conv", "vpdpbusd"),
    ("AVX512_CORE", "conv", "vpmaddwd"),
    ("AVX512_CORE_VNNI", "conv", "vpdpbusd"),
    ("AVX512_CORE_AMX", "tiles", "tdpbusd"),
    ("NEON", "conv", "smlal"),
    ("DOTPROD", "conv", "sdot"),
    ("I8MM", "conv", "usdot"),
)
SETS: Final = {each.name: each for each in INSTRUCTION_SETS}
ON_AVX2: Final = ("c++", *SETS["AVX2"].options)
RUN: Final = {
    "NEON": Target((ARM, "-march=armv8-a", "-static"), (EMULATOR,)),
    "NEON, dot products": Target((ARM, "-march=armv8.2-a+dotprod", "-static"), (EMULATOR, "-cpu", "max")),
    "NEON, i8mm": Target((ARM, "-march=armv8.2-a+dotprod+i8mm", "-static"), (EMULATOR, "-cpu", "max")),
    "NEON, dot products, by clang": Target(
        ("clang++", "--target=aarch64-linux-gnu", "-march=armv8.2-a+dotprod", "-static"), (EMULATOR, "-cpu", "max")
    ),
    "plain vectors, by clang": Target(("clang++", "-march=x86-64")),
    "products of bytes on plain vectors": Target(("c++", "-march=x86-64", "-DHAGO_PLAIN_BYTES", *SANITIZED)),
    "plain vectors": Target(("c++", "-march=x86-64", *SANITIZED)),
    "AVX2": Target((*ON_AVX2, *SANITIZED), (), SETS["AVX2"].flags),
    **{
        f"{name}, emulated": Target((*ON_AVX2, *emulating_options(name), *SANITIZED), (), SETS["AVX2"].flags, name)
        for name in EMULATES
    },
}


def require(*tools: str) -> None:
    """Skip the test where a tool is missing."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


@dataclass(frozen=True)
class Described:
    """The library of another processor, as far as packing asks it."""

    widest: int
    bytes_in_panels: int
    bytes_by_channel: int
    signed: int
    winograd_channels: int

    def hago_widest_panel(self) -> int:
        return self.widest

    def hago_adds_bytes(self, by_channel: bool) -> int:
        return self.bytes_by_channel if by_channel else self.bytes_in_panels

    def hago_reads_signed(self) -> int:
        return self.signed

    def hago_winograd_channels(self) -> int:
        return self.winograd_channels

    def hago_pair_fours(self, *arguments: Any) -> None:
        native.library().calls.hago_pair_fours(*arguments)  # every library has it


#: Channels, output channels, groups, kernel, stride, padding, dilation, height and width.
CONVOLUTIONS: Final = (
    *((64, 80, 1, (1, 1), (1, 1), (0, 0), (1, 1), 5, 7), (3, 20, 1, (7, 7), (2, 2), (3, 3), (1, 1), 15, 13)),
    *((12, 8, 2, (3, 3), (1, 1), (1, 1), (1, 1), 6, 5), (5, 33, 1, (3, 2), (2, 1), (1, 0), (1, 2), 9, 9)),
    *((70, 70, 70, (3, 3), (1, 1), (1, 1), (1, 1), 9, 8), (40, 40, 40, (5, 5), (2, 2), (2, 2), (1, 1), 11, 20)),
    *((16, 16, 16, (3, 3), (2, 1), (2, 2), (2, 2), 8, 8), (32, 16, 1, (3, 3), (1, 1), (1, 1), (1, 1), 40, 31)),
    *((72, 40, 2, (3, 3), (1, 1), (1, 2), (1, 1), 7, 9), (48, 20, 1, (3, 3), (1, 1), (0, 1), (1, 1), 3, 30)),
    # padding that is wider than windows, around images of one row
    *((40, 40, 40, (1, 3), (1, 1), (0, 5), (1, 1), 1, 4), (40, 40, 40, (1, 3), (1, 7), (0, 9), (1, 1), 1, 2)),
    *((16, 24, 1, (1, 3), (1, 1), (0, 5), (1, 1), 1, 4), (3, 16, 1, (2, 3), (1, 1), (4, 5), (1, 1), 2, 3)),
    # windows of fours at pixels: in place and across edges, in groups, of one tap and of several
    *((32, 16, 1, (3, 3), (2, 2), (1, 1), (1, 1), 9, 33), (32, 16, 2, (3, 3), (2, 1), (1, 1), (1, 1), 7, 5)),
    *((64, 16, 1, (1, 1), (1, 1), (0, 0), (1, 1), 13, 15), (48, 48, 48, (3, 3), (1, 1), (1, 1), (1, 1), 9, 13)),
)


def write_cases(path: Path, calls: Described, *, tiles: bool) -> None:
    """Every convolution on extreme and random values of every type, with its exact sums.

    Args:
        tiles: whether weights are packed for matrix tiles where products are of bytes.
    """
    generator = torch.Generator().manual_seed(1)
    with path.open("wb") as file:
        for channels, out, groups, *sizes, height, width in CONVOLUTIONS:
            kernel, stride, padding, dilation = sizes
            geometry = Geometry(channels, out, groups, kernel, stride, padding, dilation)
            for dtype, zero in ((torch.uint8, 0), (torch.uint8, 131), (torch.int8, -3), (torch.int16, 0)):
                ends = torch.iinfo(dtype)
                x = torch.randint(ends.min, ends.max + 1, (2, channels, height, width), generator=generator)
                x = torch.where(torch.rand(x.shape, generator=generator) < 0.3, ends.max, x).to(dtype)
                kind = torch.iinfo(torch.int16 if dtype == torch.int16 else torch.int8)
                w = torch.randint(kind.min, kind.max + 1, (out, channels // groups, *kernel), generator=generator)
                w = torch.where(torch.rand(w.shape, generator=generator) < 0.3, kind.min, w)
                if dtype != torch.int16 and out == 16:
                    # of bell-shaped weights, few pairs exceed 16 bits
                    w = (32 * torch.randn(w.shape, generator=generator)).round().clamp(kind.min, kind.max)
                bias = torch.randint(-1000, 1000, (out,), generator=generator)
                exact = F.conv2d(x.double() - zero, w.double(), bias.double(), stride, padding, dilation, groups)
                most = None if dtype == torch.int16 else 255
                packed = pack_for(calls, w, geometry, most, tiles)
                epilogue = Epilogue(out, [], stored=[StoredOutput("", AS_IS, SUMS)]).build()
                source = (native.TYPES[str(dtype).removeprefix("torch.")], zero)
                call = conv_call(calls, geometry, packed, source, epilogue, bias)  # type: ignore[arg-type]
                fields = [getattr(call.template, name) for name, kind in native.Conv._fields_ if kind is native.c_int32]
                weight, offset, zeros, *fours = call.kept
                put(file, torch.tensor(fields, dtype=torch.int32))
                put(file, torch.tensor([2, height, width, *exact.shape[2:]], dtype=torch.int64))
                for tensor in (weight, offset, zeros, x.permute(0, 2, 3, 1)):
                    put(file, tensor, bytes_of=tensor is not offset)
                for tensor in fours or (torch.zeros(0, dtype=torch.int32),) * 3:
                    put(file, tensor)
                put(file, exact.permute(0, 2, 3, 1).to(torch.int64).to(torch.int32))


def put(file: Any, tensor: Tensor, bytes_of: bool = False) -> None:
    """The number of values, or of bytes, and the values."""
    array = tensor.contiguous().numpy()
    file.write((array.nbytes if bytes_of else array.size).to_bytes(8, "little") + array.tobytes())


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("name", RUN)
def test_sums_are_exact(name: str, tmp_path: Path) -> None:
    target = RUN[name]
    require(target.compiler[0], *target.run[:1])
    missing = [flag for flag in target.flags if flag not in processor_flags()]
    if missing:
        pytest.skip(f"built only: the processor has no {', '.join(missing)}")
    program = tmp_path / "program"
    folder = build.SOURCES
    if target.emulates:
        folder = tmp_path / "emulating"
        folder.mkdir()
        write_emulating(folder)
    sources = [str(folder / f"{part}.cpp") for part in PARTS]
    options = [option for option in build.OPTIONS if option not in ("-O3", "-fPIC", "-shared")]
    if target.compiler[0] != "clang++":  # its OpenMP is a package of its own
        options += ["-fopenmp"]
    here = str(Path(__file__).with_name("kernel_cases.cpp"))
    # without optimization they compile in half the time; the other tests of kernels run them as they ship
    command = [*target.compiler, "-O0", *options, f"-I{folder}", here, *sources, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    said = subprocess.run([*target.run, str(program)], check=True, capture_output=True, text=True, timeout=60).stdout
    cases = tmp_path / "cases"
    write_cases(cases, Described(*map(int, said.split())), tiles=target.emulates == "AVX512_CORE_AMX")
    run = [*target.run, str(program), str(cases)]
    done = subprocess.run(run, check=False, capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith(f"{4 * len(CONVOLUTIONS)} cases, 0 of "), (done.stdout, done.stderr[-500:])


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("name", "part", "instruction"), BUILT)
def test_instructions_are_used(name: str, part: str, instruction: str, tmp_path: Path) -> None:
    compiler, objdump = (ARM, f"{ARM.removesuffix('g++')}objdump") if SETS[name].machine == "aarch64" else X86
    require(compiler, objdump)
    built = tmp_path / "kernels.o"
    source = build.SOURCES / f"{part}.cpp"
    options = [*SETS[name].options, *build.OPTIONS[1:3], "-fopenmp"]
    command = [compiler, "-c", "-O1", *options, str(source), "-o", str(built)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    if "-march" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip(f"the compiler does not know {name}")
    assert done.returncode == 0, done.stderr[-500:]
    listing = subprocess.run([objdump, "-d", str(built)], check=True, capture_output=True, text=True, timeout=60)
    assert instruction in listing.stdout
