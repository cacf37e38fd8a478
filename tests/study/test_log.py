"""The log: its format, torn lines and damaged lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from toys import resumed, run, timeless, without_relu

from hago.errors import LogError
from hago.study.log import is_log, parse_log, read_log


def test_form_of_a_line(whole: bytes) -> None:
    header, first, *_ = (json.loads(line) for line in whole.splitlines())
    assert header["hardware"] == {"name": "toy", "hash": "h" * 8}
    assert header["space"]["choices"] == 11
    assert first["strategy"]["bits"] == {"add:1": 16, "conv:0": 8, "conv:1": 8, "relu:0": 8}
    assert first["strategy"]["model_hash"] == header["model_hash"]
    assert first["results"] == {"sim_acc": 0.1, "sqnr": first["score"]["value"] / 3}
    assert first["same_as"] is None
    assert first["why"] == "start"
    assert [json.loads(line)["same_as"] for line in whole.splitlines()[1:]].count(None) == 6


def test_lines_are_canonical(whole: bytes) -> None:
    for line in whole.decode().splitlines():
        assert line == json.dumps(json.loads(line), sort_keys=True)


def test_reading_gives_the_trials_and_changes_nothing(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    result = run("exhaustive", path, plan_key=without_relu, budget=10)
    assert read_log(path).trials == result.trials
    path.write_bytes(path.read_bytes() + b'{"torn')
    notices: list[str] = []
    found = read_log(path, notices.append)
    assert (found.trials, found.torn_bytes) == (result.trials, 6)
    assert notices == [f"{path}: the last line is torn (6 bytes); left out"]
    assert path.read_bytes().endswith(b'{"torn')


def test_the_default_notice_is_a_logged_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    run("greedy", path, budget=3)
    path.write_bytes(path.read_bytes()[:-5])
    run("greedy", path, budget=3)
    assert "the last line is torn" in caplog.text


@pytest.mark.parametrize(
    "tail", [b"{", b'{"index": 10', b"\n", b"\0" * 40, b"\xff\xfe", b"garbage\n", b'{"a": 1}', b"[" * 9000]
)
def test_a_torn_last_line_is_dropped(tail: bytes, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(whole + tail)
    assert parse_log(whole + tail, "log").complete_bytes == len(whole)
    assert resumed(path) == whole


def test_an_empty_file_is_a_new_log(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    assert timeless(resumed(path)) == timeless(whole)


@pytest.mark.parametrize("content", [b"PK\3\4 a checkpoint", b"\0" * 64, b"{}", b'{"data": 1', b"notes\n"])
def test_a_file_that_is_no_log_is_not_touched(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(LogError, match="is not a search log of hago"):
        run("greedy", path)
    assert path.read_bytes() == content


def edited(whole: bytes, number: int, edit: Callable[[dict], None]) -> bytes:
    """The log with line `number` (from 1) changed by `edit`."""
    lines = whole.splitlines(keepends=True)
    record = json.loads(lines[number - 1])
    edit(record)
    lines[number - 1] = json.dumps(record, sort_keys=True).encode() + b"\n"
    return b"".join(lines)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda r: r.update(index=7), r"at \$.index: got 7, expected 2"),
        (lambda r: r.update(version=9), r"at \$.version: got 9, expected 1 to 2; .*newer hago"),
        (lambda r: r.update(version=True), r"at \$.version: got True"),
        (lambda r: r.pop("why"), r"at \$: .*expected the key 'why'"),
        (lambda r: r.update(indx=7), r"at \$: .*expected no key 'indx'. Did you mean 'index'"),
        (lambda r: r["score"].update(value="high"), r"at \$.score.value: got 'high'"),
        (lambda r: r["score"].update(value=None), r"at \$.score.value: got None"),
        (lambda r: r["score"].update(value=0.123), r"at \$.score: got another than trial 0"),
        (lambda r: r["score"].update(unproved=-1), r"\$.score.unproved: got -1, expected minimum 0"),
        (lambda r: r["strategy"]["bits"].update({"add:1": 1.5}), r"\$.strategy.bits\['add:1'\]: got 1.5"),
        (lambda r: r["strategy"]["bits"].update({"x:1": 8}), r"\$.strategy.bits: 'x:1' is not in every"),
        (lambda r: r["strategy"].update(model_hash="z"), r"\$.strategy.model_hash: got 'z'"),
        (lambda r: r.update(same_as=2), r"at \$.same_as: got 2, expected an earlier trial"),
        (lambda r: r.update(results=[]), r"at \$.results: got \[\], expected type 'object'"),
    ],
)
def test_an_edited_line_is_refused(edit, words: str, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    damaged = edited(whole, 4, edit)
    path.write_bytes(damaged)
    for act in (read_log, resumed):
        with pytest.raises(LogError, match=words) as caught:
            act(path)
        assert f"{path}, line 4: at $" in str(caught.value)
    assert path.read_bytes() == damaged


def test_an_edit_that_only_a_replay_detects_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(edited(whole, 4, lambda r: r.update(same_as=None)))
    with pytest.raises(LogError, match="trial 2 has same_as None, this search has 0"):
        resumed(path)
    path.write_bytes(edited(whole, 4, lambda r: r["strategy"]["bits"].update({"relu:0": 8})))
    with pytest.raises(LogError, match="trial 2 has 8 bits at 'relu:0', this search asks 4"):
        resumed(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not the JSON that hago writes"),
        (b"", "not the JSON that hago writes"),
        (b"\xff", "not text"),
        (b"[1]", r"at \$.version: got None"),
        (b'{"version": 1, "version": 1}', "key 'version' occurs twice"),
        (b'{"version": NaN}', "NaN is not a JSON number"),
        (b'{"version": 1e999}', "1e999 is too large"),
        (b'{"version": ' + b"1" * 400 + b"}", "an integer of 400 digits"),
        (b"[" * 90_000, "not the JSON that hago writes"),
    ],
)
def test_a_bad_line_in_the_middle_is_refused(line: bytes, words: str, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = whole.splitlines()
    path.write_bytes(b"\n".join([*lines[:3], line, *lines[4:], b""]))
    with pytest.raises(LogError, match=f"line 4: .*{words}"):
        resumed(path)


def test_a_log_without_its_header_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(whole.split(b"\n", 1)[1])
    with pytest.raises(LogError, match=r"line 1: at \$: .*expected the key 'model_hash'"):
        read_log(path)


@pytest.mark.parametrize("act", [read_log, lambda path: run("greedy", path)])
def test_a_path_that_cannot_be_opened(act, tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"cannot (read|open) log"):
        act(tmp_path)
    with pytest.raises(LogError, match=r"cannot (read|open) log"):
        act(tmp_path / "absent" / "log")


def test_a_log_is_known_whatever_its_ending(tmp_path: Path) -> None:
    log, other, missing = tmp_path / "renamed.log", tmp_path / "strategy.json", tmp_path / "none.txt"
    log.write_bytes(b'{"data_hash": "0"}\n')
    other.write_text('{"bits": {}}')
    assert [is_log(p) for p in (log, other, missing, tmp_path / "new.jsonl")] == [True, False, False, True]
