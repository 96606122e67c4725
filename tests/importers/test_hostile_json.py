"""JSON from outside with any value anywhere: an importer gives a trace or one clear line."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.errors import BadTrace
from stallscope.importers import importer_for
from stallscope.importers.texts import text_of

from .test_inspector_log import START_US, record
from .test_profiler_trace import profiles
from .test_ras_status import answer

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.just([]),
    st.just({}),
    st.just([[[]]]),
)


def places(expected: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of the values in nested JSON; of long lists only the first few."""
    items = (
        expected.items()
        if isinstance(expected, dict)
        else enumerate(expected[:6])
        if isinstance(expected, list)
        else ()
    )
    return [index for key, value in items for index in [(*path, key), *places(value, (*path, key))]]


def with_value(expected: Any, index: tuple[Any, ...], value: Any) -> Any:
    changed = json.loads(json.dumps(expected))
    inner = changed
    for key in index[:-1]:
        inner = inner[key]
    inner[index[-1]] = value
    return changed


SEEDS = {
    "profile": (profiles({})[0], ".pt.trace.json"),
    "ras": (answer({0: 3, 1: 4, 2: 4}, "2026-06-19 06:51:10", {3: "dead"}), ".json"),
    "inspector": (record(0, 1, 10, START_US), ".log"),
}


@pytest.mark.parametrize("kind", SEEDS)
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), value=VALUES)
def test_any_value_anywhere(tmp_path: Path, kind: str, seed: int, value: Any):
    output, ending = SEEDS[kind]
    index = random.Random(seed).choice(places(output))
    file = tmp_path / f"hostile{ending}"
    file.write_text(json.dumps(with_value(output, index, value)))
    try:
        importer_for(file).read(file)
    except BadTrace as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000


def test_a_long_text_with_a_wide_letter_takes_one_byte_for_each(tmp_path):
    file = tmp_path / "wide.json"
    file.write_bytes("😀".encode() + b"a" * (65 << 20))
    assert text_of(file, 100 << 20).isascii()
    file.write_bytes("😀".encode())
    assert text_of(file, 100) == "😀"
