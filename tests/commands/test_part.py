"""The options that choose a part of a trace."""

import json

import pytest

from stallscope.commands.part import last_part, step_range, wall_ns
from stallscope.errors import BadInput


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("100..200", (100, 200)),
        ("100..", (100, 1 << 62)),
        ("..200", (0, 200)),
        ("7", (7, 7)),
        (" 1..1 ", (1, 1)),
    ],
)
def test_ranges_of_steps(text, wanted):
    assert step_range(text) == wanted


@pytest.mark.parametrize("text", ["", "..", "a..b", "5..3", "1-2", "-1", "1...2", "9" * 25])
def test_ranges_that_are_none(text):
    with pytest.raises(BadInput, match="--step"):
        step_range(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("30", (30, None)),
        ("1,000", (1000, None)),
        ("5m", (None, 300 * 10**9)),
        ("90 s", (None, 90 * 10**9)),
        ("1h30m", (None, 5400 * 10**9)),
        ("2 min", (None, 120 * 10**9)),
    ],
)
def test_last_is_a_number_of_rounds_or_a_duration(text, wanted):
    assert last_part(text) == wanted


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "many", "9" * 25, "0m", "5x", "1e3", "999999999999d"])
def test_last_refuses_other_values(text):
    with pytest.raises(BadInput, match="--last"):
        last_part(text)


def test_times_without_an_offset_are_utc():
    assert wall_ns("2026-11-28T14:03:20", "--from") == 1795874600 * 10**9
    assert wall_ns("2026-11-28T14:03:20.5Z", "--from") == 1795874600 * 10**9 + 5 * 10**8
    assert wall_ns("2026-11-28T15:03:20+01:00", "--from") == 1795874600 * 10**9
    assert wall_ns("14:03", "--from") % (86_400 * 10**9) == (14 * 60 + 3) * 60 * 10**9
    for text in ("", "soon", "25:00", "14"):
        with pytest.raises(BadInput, match="--from"):
            wall_ns(text, "--from")


def test_explain_query_and_export_take_them(run, db, tmp_path):
    data = json.loads(run("explain", "--db", db, "--json", "--last", "30")[1])
    assert data["examined"]["n_rounds"] == 30
    out = run("query", "--db", db, "--last", "30", "SELECT count(DISTINCT seq) AS n FROM collectives")[1]
    assert out.split() == ["n", "30"]
    assert run("export", "--db", db, "--last", "30", "--format", "csv", "-o", tmp_path / "part")[0] == 0
    assert len((tmp_path / "part/collectives.csv").read_text().splitlines()) == 121


def test_a_step_range_without_annotated_steps_is_an_error(run, db):
    for word in ("explain", "query"):
        code, out, err = run(word, "--db", db, "--step", "1..2", *(["SELECT 1"] if word == "query" else []))
        assert (code, out) == (3, "")
        assert "annotate" in err


@pytest.mark.parametrize("word", ["explain", "query", "export"])
def test_a_window_that_ends_before_it_begins_is_refused_with_both_times(run, db, tmp_path, word):
    rest = {"query": ["SELECT 1"], "export": ["--format", "csv", "-o", tmp_path / "part"]}.get(word, [])
    window = ["--from", "2026-11-28T14:03:20", "--to", "2026-11-28T14:03:19"]
    code, out, err = run(word, "--db", db, *window, *rest)
    assert (code, out) == (2, "")
    assert all(moment in err for moment in window)
