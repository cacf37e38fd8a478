"""A log with any change in it is loaded or refused; no other error occurs."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from toys import resumed

from hago.errors import HagoError
from hago.study.log import parse_log

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**320), 10**320)
    | st.floats()
    | st.sampled_from(["", "inf", "-inf", "nan", "conv:0", "8"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "value"]), inner),
    max_leaves=4,
)


def paths(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all values in JSON values."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from paths(part, (*path, key))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_log_with_other_values_loads_or_is_refused(whole: bytes, data: st.DataObject) -> None:
    records = [json.loads(line) for line in whole.splitlines()]
    number = data.draw(st.integers(0, 4))
    path = data.draw(st.sampled_from([p for p in paths(records[number]) if p]))
    part = records[number]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = data.draw(JSON)
    content = "".join(json.dumps(r, sort_keys=True) + "\n" for r in records).encode()
    with contextlib.suppress(HagoError):
        assert len(parse_log(content, "log").trials) == 10


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_log_with_other_bytes_loads_or_is_refused(whole: bytes, data: st.DataObject) -> None:
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        to = at + data.draw(st.integers(0, 40))
        content[at:to] = data.draw(st.binary(max_size=6) | st.sampled_from([b"\n", b"{", b'"', b"1e999"]))
    with contextlib.suppress(HagoError):
        found = parse_log(bytes(content), "log")
        assert found.complete_bytes + found.torn_bytes == len(content)


def test_a_search_on_a_mutated_log_ends_or_is_refused(whole: bytes, tmp_path: Path) -> None:
    draw = random.Random(0)
    path = tmp_path / "log"
    outcomes = set()
    for _ in range(150):
        content = bytearray(whole)
        at = draw.randrange(len(content))
        content[at : at + draw.randrange(3)] = draw.choice([b"", b"0", b"7", b"}", b"\n", b"x"])
        path.write_bytes(content)
        try:
            resumed(path)
            outcomes.add("ends")
        except HagoError:
            outcomes.add("refused")
            assert path.read_bytes() == content
    assert outcomes == {"ends", "refused"}
