"""Self-tests of kernels: each check detects an inexact kernel, and only exact kernels are used."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

import pytest
import torch
import torch.nn.functional as F
from building import residual_block, seeded
from plans import resolver_of
from torch import Tensor, nn

import hago
from hago import from_torch
from hago.arithmetic.numerics import Requantize, RequantizeForm
from hago.arithmetic.rounding import ROUNDINGS, rounding_shift
from hago.arithmetic.types import INT32, UINT8, QParams, SimQ
from hago.hardware.file import load_hardware
from hago.ops import OPS
from hago.plan.plan import Plan
from hago.runtime.native import build
from hago.runtime.native import library as native
from hago.runtime.native.calls import RowsCall, TableCall
from hago.runtime.native.epilogue import Epilogue, StoredOutput
from hago.runtime.native.executor import Executor
from hago.runtime.native.kernels import KERNELS
from hago.runtime.native.onednn import requantizes_exactly
from hago.runtime.native.requantize import FORMS, period, requantization_of
from hago.runtime.native.self_test import NOTHING, Verdict, check_fused, check_passes, check_sums, exact_kernels
from hago.runtime.reference import IntegerModel
from runtime.instruction_sets import INSTRUCTION_SETS, library_for

WRONG = Verdict(False, "found wrong")


def exact(x: Tensor, w: Tensor, groups: int) -> Tensor:
    return F.conv2d(x.double(), w.double(), groups=groups)


def saturating(x: Tensor, w: Tensor, groups: int) -> Tensor:
    """Products added by two in a saturating int16, as processors without VNNI do."""
    out, each, height, width = w.shape
    columns = F.unfold(x.double(), (height, width)).reshape(len(x), groups, each * height * width, -1)
    rows = w.double().reshape(groups, out // groups, -1)
    products = columns.unsqueeze(2) * rows[None, :, :, :, None]
    if products.shape[3] % 2:
        products = torch.cat([products, torch.zeros_like(products[:, :, :, :1])], 3)
    pairs = products.unflatten(3, (-1, 2)).sum(4).clamp(-(2**15), 2**15 - 1)
    shape = (len(x), out, x.shape[2] - height + 1, x.shape[3] - width + 1)
    return pairs.sum(3).reshape(shape)


def test_an_exact_convolution_passes() -> None:
    assert check_sums(exact).exact


def test_a_saturating_convolution_is_detected() -> None:
    found = check_sums(saturating)
    assert not found.exact and "are wrong" in found.why


def test_a_convolution_that_is_off_by_one_is_detected() -> None:
    assert not check_sums(lambda x, w, groups: exact(x, w, groups).float().half().float()).exact


def test_a_convolution_that_is_refused_is_not_used() -> None:
    def refuse(x: Tensor, w: Tensor, groups: int) -> Tensor:
        raise RuntimeError("no such instruction\nand a trace")

    assert check_sums(refuse) == Verdict(False, "refused: no such instruction")


@pytest.mark.parametrize("rounds", [torch.floor, torch.trunc, lambda v: torch.floor(v + 0.5)])
def test_another_rounding_is_detected(rounds: object) -> None:
    def fused(x: Tensor, w: Tensor, ratio: float, zero: int) -> Tensor:
        assert callable(rounds)
        return (rounds(exact(x, w, 1) * ratio) + zero).clamp(0, 255).to(torch.uint8)

    assert not check_fused(fused).exact
    assert check_fused(lambda x, w, r, z: (torch.round(exact(x, w, 1) * r) + z).clamp(0, 255).to(torch.uint8)).exact


def test_every_op_of_the_kernel_table_exists() -> None:
    assert set(KERNELS) <= set(OPS)


def test_the_library_has_no_form_and_no_rounding_of_its_own() -> None:
    assert set(native.ROUNDINGS) <= set(ROUNDINGS) and set(FORMS) <= set(get_args(RequantizeForm))


@pytest.mark.parametrize("form", ["float32", "multiplier_shift", "shift"])
def test_a_rounding_that_the_library_lacks_runs_on_the_reference(
    form: RequantizeForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that requantize refuse it by name; the self-test does not ask for it."""
    monkeypatch.setitem(cast("dict[str, Callable[[Tensor], Tensor]]", ROUNDINGS), "up", torch.ceil)

    def with_up(p: Tensor, n: Tensor, rounding: str) -> Tensor:
        return -rounding_shift(-p, n, "floor") if rounding == "up" else rounding_shift(p, n, rounding)

    monkeypatch.setattr("hago.arithmetic.numerics.rounding_shift", with_up)
    if native.library().calls is not None:
        assert check_passes(native.library().calls).exact
    estimator = "power2_range" if form == "shift" else "max_range"
    chip = replace(load_hardware("x86_vnni"), requantize=Requantize(form, "up"))
    resolver = resolver_of(residual_block(), chip, [seeded(2, 3, 8, 8)], estimator)
    plan, x = resolver(resolver.space.widest()), seeded(3, 3, 8, 8, seed=4)
    assert Executor(plan).run([x])[0].equal(IntegerModel(plan).run([x])[0])
    simqs = [s for s in plan.edges.values() if s is not None and s.source is not None and s.target is not None]
    reasons = {requantization_of(s, chip.requantize, s.source.scale.numel(), 1e6) for s in simqs if s.source}
    assert reasons == {"rounding 'up', which the kernels do not have"}


def test_a_requantize_form_that_the_library_lacks_is_refused_by_name() -> None:
    how, one = copy(Requantize()), torch.ones((), dtype=torch.float64)
    object.__setattr__(how, "form", "made_up")
    sums = QParams(one, torch.tensor(0), INT32.min, INT32.max, INT32)
    simq = SimQ(sums, QParams(2 * one, torch.tensor(0), 0, 255, UINT8))
    assert requantization_of(simq, how, 1, 2**31 - 1) == "requantize form 'made_up', which the kernels do not have"
    assert not requantizes_exactly(simq, how) and requantizes_exactly(simq, Requantize())


def test_a_library_with_another_rounding_is_detected() -> None:
    library = native.library()
    if library.calls is None:
        pytest.skip(library.why)
    assert check_passes(library.calls).exact

    class Lying:
        hago_table, hago_count_bins = library.calls.hago_table, library.calls.hago_count_bins

        def hago_rows(self, epilogue: int, *rest: object) -> None:
            library.calls.hago_rows(epilogue, *rest)
            output = native.EpilogueParams.from_address(epilogue).output[0]
            first = (native.c_int32 * 1).from_address(output.data)
            first[0] ^= 1

    class LyingTable:
        hago_rows, hago_count_bins = library.calls.hago_rows, library.calls.hago_count_bins

        def hago_table(self, x: int, entries: int, output: int, *rest: object) -> None:
            library.calls.hago_table(x, entries, output, *rest)
            (native.c_int32 * 1).from_address(output)[0] ^= 1

    assert not check_passes(Lying()).exact
    assert not check_passes(LyingTable()).exact


def test_a_library_that_counts_an_edge_in_the_other_bin_is_detected() -> None:
    library = native.library()
    if library.calls is None:
        pytest.skip(library.why)

    class LyingCounts:
        hago_rows, hago_table = library.calls.hago_rows, library.calls.hago_table

        def hago_count_bins(self, x: int, n: int, per_value: float, bins: int, counts: int, threads: int) -> None:
            values = torch.tensor((native.c_float * n).from_address(x))
            above = values.nextafter(torch.tensor(torch.inf)).clamp(max=float(values.max()))  # none beyond the last bin
            library.calls.hago_count_bins(above.data_ptr(), n, per_value, bins, counts, threads)

    assert not check_passes(LyingCounts()).exact


@pytest.mark.parametrize("how", [Requantize("float32"), Requantize("multiplier_shift")], ids=str)
def test_a_narrow_range_far_from_its_zero_point(how: Requantize) -> None:
    """Centered limits of which float32 holds every other only, in the kernels as in the reference."""
    library = native.library()
    if library.calls is None:
        pytest.skip(library.why)
    zero, one = torch.tensor(2**24 + 151), torch.ones((), dtype=torch.float64)
    target = QParams(one, zero, -50, 51, INT32)
    simq = SimQ(QParams(1024 * one, torch.tensor(0), INT32.min, INT32.max, INT32), target)
    moved = requantization_of(simq, how, 1, 2**31 - 1)
    assert not isinstance(moved, str)
    epilogue = Epilogue(1, [], stored=[StoredOutput("", moved, target)]).build()
    sums = torch.tensor([2**22, -(2**22)], dtype=torch.int32)
    (found,) = RowsCall(library.calls, epilogue, (native.TYPES["int32"], 0), None, period(1))([sums])
    assert found.tolist() == [51, -50]


# ---------------------------------------------------------------- what is used then
def _plan() -> Plan:
    resolver = resolver_of(residual_block(), load_hardware("x86_vnni"), [seeded(2, 3, 8, 8)], "power2_range")
    return resolver(resolver.space.widest())


def test_onednn_is_not_tested_for_models_that_do_not_run_it() -> None:
    def of_onednn() -> tuple[Verdict, Verdict]:
        raise AssertionError

    plan, x, found = _plan(), seeded(3, 3, 8, 8, seed=4), replace(exact_kernels(), of_onednn=of_onednn)
    if not found.outrun_floats:
        pytest.skip(found.why)
    assert torch.equal(Executor(plan, using=found).run([x])[0], IntegerModel(plan).run([x])[0])
    with pytest.raises(AssertionError):
        Executor(plan, using=replace(found, conv=WRONG))


def test_inexact_kernels_are_not_used_and_outputs_are_equal() -> None:
    plan, x, found = _plan(), seeded(3, 3, 8, 8, seed=4), exact_kernels()
    (expected,) = IntegerModel(plan).run([x])
    without = {
        "native conv": replace(found, conv=WRONG),
        "native": replace(found, conv=WRONG, calls=None),
        "oneDNN": replace(found, conv=WRONG, of_onednn=lambda: (WRONG, WRONG)),
        "": NOTHING,
    }
    for forbidden, using in without.items():
        executor = Executor(plan, using=using)
        assert executor.run([x])[0].equal(expected)
        used = executor.explain().kernels
        assert not forbidden or not any(name.startswith(forbidden) for name in used), used
    assert set(Executor(plan, using=NOTHING).explain().kernels) <= {
        "torch in floats",
        "reference",
        "none",
        "torch on bytes",
    }


def test_sixteen_bit_values_use_the_word_kernels_if_these_are_exact() -> None:
    found = exact_kernels()
    if not found.words.exact:
        pytest.skip(found.words.why)
    x = seeded(3, 3, 8, 8, seed=4)
    resolver = resolver_of(residual_block(), load_hardware("tflite_int16"), [x])
    plan = resolver(resolver.space.widest())
    (expected,) = IntegerModel(plan).run([x])
    for using, kernel in ((found, True), (replace(found, words=WRONG), False), (replace(found, conv=WRONG), False)):
        executor = Executor(plan, using=using)
        assert executor.run([x])[0].equal(expected)
        assert ("native conv of words" in executor.explain().kernels) == kernel


def test_wide_windows_use_matrix_tiles_if_these_are_exact() -> None:
    found = exact_kernels()
    if not found.tiles.exact:
        pytest.skip(found.tiles.why)
    model = nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU(), nn.Conv2d(64, 40, 3, padding=1), nn.ReLU(), nn.Flatten(1))
    torch.manual_seed(0)
    x = seeded(3, 3, 9, 20, seed=4)
    resolver = resolver_of(from_torch(model.eval(), (x,)), load_hardware("x86_vnni"), [x], "power2_range")
    plan = resolver(resolver.space.widest())
    (expected,) = IntegerModel(plan).run([x])
    for using, kernel in ((found, "native conv on tiles"), (replace(found, tiles=WRONG), "native conv")):
        executor = Executor(plan, using=using)
        assert executor.explain().rows[2].kernel == kernel
        assert executor.run([x])[0].equal(expected)


def test_onednn_requantizes_by_powers_of_two() -> None:
    found = exact_kernels()
    if not found.fused.exact:
        pytest.skip(found.fused.why)
    plan = _plan()
    executor = Executor(plan, using=replace(found, conv=WRONG))
    assert executor.explain().kernels["oneDNN, requantized"] >= 1
    assert executor.run([seeded(3, 3, 8, 8)])[0].equal(IntegerModel(plan).run([seeded(3, 3, 8, 8)])[0])


# ---------------------------------------------------------------- the library
def test_a_missing_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "SHIPPED", tmp_path)  # no wheel with kernels
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.delenv("HAGO_NATIVE", raising=False)
    with pytest.warns(hago.HagoWarning, match="no C.. compiler.*slower kernels of torch run instead"):
        found = native.library.__wrapped__()
    assert found.calls is None and "no C++ compiler" in found.why


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "SHIPPED", tmp_path)  # no wheel with kernels
    monkeypatch.setenv("HAGO_CACHE", "/proc/nowhere")
    monkeypatch.delenv("HAGO_NATIVE", raising=False)
    with pytest.warns(hago.HagoWarning, match="HAGO_CACHE names can be written"):
        assert native.library.__wrapped__().calls is None


def test_the_library_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAGO_NATIVE", "0")
    assert "HAGO_NATIVE" in native.library.__wrapped__().why


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_tables_with_other_instructions(instruction_set: str) -> None:
    """Every byte through random entries, in numbers that fill registers and that do not."""
    calls, generator = library_for(instruction_set).calls, torch.Generator().manual_seed(1)
    for size in (1, 63, 256, 300, 1000, 40000):
        entries, x = (torch.randint(0, 256, (n,), generator=generator).to(torch.uint8) for n in (256, size))
        x[: min(size, 256)] = torch.arange(min(size, 256), dtype=torch.uint8)
        (found,) = TableCall(calls, entries, torch.uint8)([x])
        assert found.equal(entries[x.long()])
