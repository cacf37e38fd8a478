"""TPU-MLIR's tables: what is written is read again, what the engine writes is read, the rest is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hago.emulation.tpu_mlir import tables
from hago.emulation.tpu_mlir.tables import CalibrationTable, QuantizeTable, Row
from hago.errors import HagoError

WRITTEN = """\
# mlir version: v1.30.2 cali version 1.0
# mlir: resnet18.mlir
# genetated time: 2025-01-01 12:00:00.000000
# quantization threshold calculation method: kl
# histogram number: 2048
# sample number: 100
###
# tune number: 5
###
# op_name    threshold    min    max
input.1 2.6400001 -2.1179039 2.6400001
125_Relu 4.0385718 0.0000000 6.1201849
fc_Gemm 0.0000100 -0.0000000 0.0000100

#int4_th
input.1 2.6400001 -3.0171430 2.6400001

#weight_scale
conv1_weight 3 0.5 0.25 1e-05
#asym_op
gelu_1
fc_Gemm
#int4_op
125_Relu
"""

name = st.text(st.characters(codec="utf-8", exclude_categories=("Z", "C")), min_size=1, max_size=12).filter(
    lambda n: not n.startswith("#")
)
real = st.floats(-1e6, 1e6).map(lambda v: round(v, 7))


@st.composite
def row(draw: st.DrawFn) -> Row:
    low, high = sorted((draw(real), draw(real)))
    return Row(max(abs(draw(real)), 1e-5), low, high)


rows = st.dictionaries(name, row(), max_size=4)
comment = (
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
    .map(str.strip)
    .filter(lambda c: not c.startswith("#") and not any(mark in f"# {c}" for mark, _ in tables._SECTIONS))
)


@given(
    rows,
    rows,
    rows,
    st.dictionaries(name, st.lists(st.floats(1e-9, 1e9), max_size=3).map(tuple), max_size=3),
    st.lists(name, max_size=3).map(tuple),
    st.lists(name, max_size=3).map(tuple),
    st.lists(comment, max_size=4).map(tuple),
)
def test_a_calibration_table_is_read_as_it_was_written(
    int8: dict[str, Row],
    int4: dict[str, Row],
    fp8: dict[str, Row],
    scales: dict[str, tuple[float, ...]],
    asymmetric: tuple[str, ...],
    int4_ops: tuple[str, ...],
    comments: tuple[str, ...],
) -> None:
    table = CalibrationTable(int8, int4, fp8, scales, asymmetric, int4_ops, comments)
    text = tables.format_calibration_table(table)
    again = tables.parse_calibration_table(text)
    for before, after in ((int8, again.rows), (int4, again.int4), (fp8, again.fp8)):
        assert list(before) == list(after)
        for key, value in before.items():
            assert after[key].threshold == pytest.approx(value.threshold, abs=1e-7)
            assert (after[key].minimum, after[key].maximum) == (value.minimum, value.maximum)
    assert (again.weight_scales, again.asymmetric_ops, again.int4_ops) == (scales, asymmetric, int4_ops)
    assert [c for c in again.comments if c] == [c for c in comments if c]
    assert tables.format_calibration_table(again) == text


def test_what_the_engine_writes() -> None:
    table = tables.parse_calibration_table(WRITTEN)
    assert list(table.rows) == ["input.1", "125_Relu", "fc_Gemm"]
    assert table.rows["125_Relu"] == Row(4.0385718, 0.0, 6.1201849)
    assert table.int4["input.1"].minimum == -3.0171430
    assert table.weight_scales == {"conv1_weight": (0.5, 0.25, 1e-5)}
    assert table.asymmetric_ops == ("gelu_1", "fc_Gemm") and table.int4_ops == ("125_Relu",)
    assert table.comments[0] == "mlir version: v1.30.2 cali version 1.0" and table.comments[6] == "##"


def test_the_head_is_written_as_the_engine_writes_it() -> None:
    text = tables.format_calibration_table(
        CalibrationTable({"x": Row(1.0, -1.0, 0.5)}, comments=tables.head("kl", 100, tuned=5, version="v1.30.2"))
    )
    lines = [line for line in WRITTEN.splitlines()[:10] if "mlir:" not in line and "time" not in line]
    assert text.splitlines() == [*lines, "x 1.0000000 -1.0000000 0.5000000"]


def test_a_threshold_has_a_floor_and_forced_rows_a_wider_minimum() -> None:
    text = tables.format_calibration_table(CalibrationTable({"x": Row(0.0, -1e-7, 1e-7)}))
    assert text == "x 0.0000100 -0.0000001 0.0000001\n"
    assert tables.symmetric_row(1.27).minimum == pytest.approx(-1.28)
    assert tables.int4_row(0.7).minimum == pytest.approx(-0.8)
    assert tables.symmetric_row(1.27).maximum == 1.27 and tables.int4_row(0.7).threshold == 0.7


def test_other_fp8_headings_and_windows_lines() -> None:
    text = "a 1 -1 1\r\n#tpu-mlir-fp8 caliration table\r\na 2 -2 2\r\n# mqbench-fp8\r\nb 3 -3 3\r\n"
    table = tables.parse_calibration_table(text)
    assert set(table.rows) == {"a"} and {k: v.threshold for k, v in table.fp8.items()} == {"a": 2.0, "b": 3.0}


def test_a_row_that_stands_twice_unchanged_is_one_row() -> None:
    assert list(tables.parse_calibration_table("a 1 -1 1\na 1 -1 1\n").rows) == ["a"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a 1 -1\n", "line 1 .*name threshold min max"),
        ("# x\na 1 -1 1 1\n", "line 2"),
        ("a one -1 1\n", "line 1 .*'one'"),
        ("a nan -1 1\n", "line 1 .*'nan'"),
        ("a inf -1 1\n", "line 1 .*'inf'"),
        ("a 1e999 -1 1\n", "line 1 .*'1e999'"),
        ("a 1_0 -1 1\n", "line 1 .*'1_0'"),
        ("a 1 1 -1\n", "line 1 .*min <= max"),
        ("a -1 -1 1\n", "line 1 .*threshold of 0"),
        ("a 1 -1 1\na 2 -1 1\n", "line 2 .*'a'"),
        ("#asym_op\na b\n", "line 2 .*one name"),
        ("#int4_op\na b\n", "line 2 .*one name"),
        ("#weight_scale\na 2 0.5\n", "line 2 .*count"),
        ("#weight_scale\na x 0.5\n", "line 2 .*count"),
        ("#weight_scale\na 1 x\n", "line 2 .*'x'"),
        ("#int4_th\na 1\n", "line 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(HagoError, match=says):
        tables.parse_calibration_table(text)


@given(st.text(max_size=200))
def test_no_text_escapes_as_another_error(text: str) -> None:
    for parse in (tables.parse_calibration_table, tables.parse_quantize_table):
        try:
            parse(text)
        except HagoError:
            continue


@pytest.mark.parametrize("bad", ["", "a b", "#a", "a\tb", "a\n"])
def test_names_that_would_break_a_table_are_not_written(bad: str) -> None:
    for table in (CalibrationTable({bad: Row(1, -1, 1)}), CalibrationTable({}, asymmetric_ops=(bad,))):
        with pytest.raises(HagoError, match="cannot name"):
            tables.format_calibration_table(table)
    with pytest.raises(HagoError, match="cannot name"):
        tables.format_quantize_table(QuantizeTable({bad: "F32"}))


def test_comments_that_would_break_a_table_are_not_written() -> None:
    for comment in ("two\nlines", "all about asym_op", "#int4_th"):
        with pytest.raises(HagoError, match="comment"):
            tables.format_calibration_table(CalibrationTable({}, comments=(comment,)))
    with pytest.raises(HagoError, match="line break"):
        tables.format_quantize_table(QuantizeTable({}, comments=("two\nlines",)))


# ---------------------------------------------------------------- quantize tables
@given(
    st.dictionaries(name, st.sampled_from(tables.MODES), max_size=5),
    st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=9), max_size=3).map(tuple),
)
def test_a_quantize_table_is_read_as_it_was_written(modes: dict[str, str], comments: tuple[str, ...]) -> None:
    text = tables.format_quantize_table(QuantizeTable(modes, comments))
    again = tables.parse_quantize_table(text)
    assert again == QuantizeTable(modes, comments) and list(again.modes) == list(modes)


def test_a_quantize_table_of_the_engine() -> None:
    text = "# chip: bm1684x\n###\n# op_name   quantize_mode\nconv1 F16\n# pattern layers\nfc w4int8\n"
    table = tables.parse_quantize_table(text)
    assert table.modes == {"conv1": "F16", "fc": "W4INT8"}
    assert table.comments == ("chip: bm1684x", "##", "op_name   quantize_mode", "pattern layers")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\n", "line 1 .*name MODE"),
        ("a F32 F16\n", "line 1"),
        ("# x\na F33\n", "line 2 .*'F33'.*Did you mean"),
        ("a F32\na F16\n", "line 2 .*'a'"),
    ],
)
def test_a_quantize_table_that_does_not_fit_is_refused(text: str, says: str) -> None:
    with pytest.raises(HagoError, match=says):
        tables.parse_quantize_table(text)


def test_an_unknown_mode_is_not_written() -> None:
    with pytest.raises(HagoError, match="unknown mode"):
        tables.format_quantize_table(QuantizeTable({"a": "INT7"}))
