"""A merged trace is the union of its sources: every row of every table, even if sources share numbers."""

import shutil
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.diagnose.engine import diagnose
from stallscope.errors import BadInput, BadTrace, NewerSchema, NotFound, StorageFailed
from stallscope.events import layout
from stallscope.events.trace import Clock, Trace
from stallscope.query.trace_merge import merge
from stallscope.store import node
from stallscope.store.node import NodeTrace

from ..diagnose.builders import MS, dp_trace, every
from ..importers.recordings import two_ranks


def contents(path: Path) -> dict[str, Counter[tuple[object, ...]]]:
    """The rows of every table as a multiset, numbers of nodes, symbols and stacks replaced by their names."""
    with closing(sqlite3.connect(path)) as db:
        nodes = dict(db.execute("SELECT node, name FROM nodes"))
        symbols = dict(db.execute("SELECT symbol, name FROM symbols"))
        stacks = dict(db.execute("SELECT stack, frames FROM stacks"))
        meaning = {"node": nodes, "symbol": symbols, "stack": stacks}
        out = {}
        tables = [t for (t,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            cursor = db.execute(f"SELECT * FROM {table}")
            names = [each[0] for each in cursor.description]
            kept = [i for i, name in enumerate(names) if name not in ("id", "applied_wall_ns")]
            out[table] = Counter(
                tuple(meaning[names[i]].get(row[i]) if names[i] in meaning else row[i] for i in kept)
                for row in cursor
            )
    return out


def union(parts: list[dict[str, Counter]]) -> dict[str, Counter]:
    """All rows of all parts; names that several parts know are known once."""
    out: dict[str, Counter] = {}
    for part in parts:
        for table, rows in part.items():
            known = out.setdefault(table, Counter())
            once = table in ("nodes", "symbols", "schema_version")
            out[table] = known | rows if once else known + rows
    return out


words = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=3)


@st.composite
def traces(draw: st.DrawFn, name: str) -> Trace:
    """A small trace of one node whose pids, times and symbols are few, so that they collide with others'."""
    tables = {}
    symbols = draw(st.lists(words, unique=True, max_size=3))
    for table in layout.TABLES:
        rows = layout.empty(table, draw(st.integers(0, 4)))
        for column in ("ts_ns", "pid", "tid", "comm_hash", "seq", "duration_ns"):
            if column in (rows.dtype.names or ()):
                rows[column] = draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
        if "symbol" in (rows.dtype.names or ()):
            rows["symbol"] = draw(
                st.lists(st.integers(0, len(symbols)), min_size=len(rows), max_size=len(rows))
            )
        tables[table.name] = rows
    clocks = tuple(Clock(0, at, at + 5, 1) for at in draw(st.lists(st.integers(0, 3), max_size=2)))
    lost = {"arrivals": draw(st.integers(0, 2))}
    return Trace(
        **tables, nodes=(name,), symbols=("", *symbols), clocks=clocks, lost=lost, source=f"of {name}"
    )


@settings(max_examples=25)
@given(traces("a"), traces("b"), traces("c"), st.data())
def test_the_merge_of_three_is_their_union(entry, two, three, data):
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{i}.db") for i in range(3)]
        for path, trace in zip(paths, (entry, two, three), strict=True):
            node.write(path, trace)
            _add_the_rest(path, data.draw(st.integers(0, 2)))
        done = merge(paths, Path(folder, "all.db"))
        result = contents(Path(folder, "all.db"))
        wanted = union([contents(path) for path in paths])
        assert result == wanted
        for source in done:
            counted = {table: rows.total() for table, rows in contents(source.source).items() if rows}
            for table in ("nodes", "symbols", "schema_version"):
                counted.pop(table, None)
            assert source.n_rows == counted


def _add_the_rest(path: Path, n: int) -> None:
    """Stacks that calls refer to, verdicts and annotations: as an agent writes them."""
    store = NodeTrace(path)
    number = store.node(path.stem and "abc"[int(path.stem)])
    store.insert(
        "stacks",
        ("stack", "node", "pid", "frames"),
        [(i + 1, number, 1, f"{path.stem}-{i}") for i in range(n)],
    )
    calls = layout.empty(layout.CALLS, n)
    calls["node"], calls["pid"], calls["stack"] = number, 1, np.arange(n) + 1
    store.append(layout.CALLS, calls)
    store.insert("verdicts", ("made_wall_ns", "verdict"), [(i, "{}") for i in range(n)])
    store.insert(
        "annotations",
        ("ts_ns", "node", "pid", "label", "value"),
        [(i, number, 1, "step", str(i)) for i in range(n)],
    )
    store.close()


@pytest.fixture
def two(tmp_path) -> list[Path]:
    """Two nodes of one job with the same process numbers."""
    whole = dp_trace(every(2, 7, 50 * MS), node=(0, 0, 1, 1), offset_ns=(0, 80 * MS))
    paths = []
    for number, name in enumerate(whole.nodes):
        tables = {}
        for table in layout.TABLES:
            rows = getattr(whole, table.name)
            rows = rows[rows["node"] == number].copy()
            rows["node"], rows["pid"] = 0, 1000 + rows["pid"] % 2
            tables[table.name] = rows
        clocks = tuple(replace(clock, node=0) for clock in whole.clocks if clock.node == number)
        paths.append(tmp_path / f"{name}.db")
        node.write(paths[-1], Trace(**tables, nodes=(name,), clocks=clocks, ends_ns=(whole.ends_ns[number],)))
    return paths


def test_a_job_of_two_nodes_is_explained_from_the_merged_trace(two, tmp_path):
    merge(two, tmp_path / "all.db")
    (verdict,) = diagnose(node.read(tmp_path / "all.db")).verdicts
    assert (verdict.ranks, verdict.nodes) == ([2], ["host-b"])


def test_sources_are_not_changed(two, tmp_path):
    before = [path.read_bytes() for path in two]
    merge(two, tmp_path / "all.db")
    assert [path.read_bytes() for path in two] == before


def test_a_node_that_two_sources_name_is_refused(two, tmp_path):
    with pytest.raises(BadInput, match=r"host-a.*--force-node"):
        merge([two[0], two[0]], tmp_path / "all.db")
    assert not (tmp_path / "all.db").exists()


def test_by_force_it_gets_a_name_of_its_own(two, tmp_path):
    done = merge([two[0], two[0], two[0]], tmp_path / "all.db", force_node=True)
    assert [entry.nodes for entry in done] == [("host-a",), ("host-a-2",), ("host-a-3",)]
    collectives = contents(tmp_path / "all.db")["collectives"]
    assert collectives.total() == 3 * contents(two[0])["collectives"].total()
    assert max(collectives.values()) == 1


def test_a_merged_trace_can_be_merged_again(two, tmp_path):
    node.write(tmp_path / "c.db", replace(dp_trace(), nodes=("host-c",)))
    merge(two, tmp_path / "ab.db")
    merge([tmp_path / "ab.db", tmp_path / "c.db"], tmp_path / "abc.db")
    merge([*two, tmp_path / "c.db"], tmp_path / "direct.db")
    assert contents(tmp_path / "abc.db") == contents(tmp_path / "direct.db")


def test_a_recording_is_imported_on_the_way(two, tmp_path):
    recording = two_ranks().write(tmp_path / "recording")
    done = merge([two[0], recording], tmp_path / "all.db")
    assert done[1].n_rows["collectives"] > 0
    assert len(node.read(tmp_path / "all.db").nodes) == 2


def test_an_older_trace_without_a_column_is_merged(two, tmp_path):
    with closing(sqlite3.connect(two[1])) as plain, plain:
        plain.execute("ALTER TABLE collectives DROP COLUMN comm_handle")
        plain.execute("ALTER TABLE collectives DROP COLUMN gpu_start_ns")
    merge(two, tmp_path / "all.db")
    rows = node.read(tmp_path / "all.db").collectives
    assert set(rows["comm_handle"].tolist()) == {0}
    assert set(rows["gpu_start_ns"].tolist()) == {-1}


def test_a_merge_with_an_invalid_source_leaves_no_files(two, tmp_path):
    (tmp_path / "text.db").write_text("no trace" * 100)
    newer = tmp_path / "newer.db"
    shutil.copy(two[0], newer)
    with closing(sqlite3.connect(newer)) as plain, plain:
        plain.execute("INSERT INTO schema_version VALUES (99, 0)")
    for path, error in (("text.db", BadTrace), ("none.db", NotFound), ("newer.db", NewerSchema)):
        with pytest.raises(error, match=path):
            merge([two[0], tmp_path / path], tmp_path / "all.db")
    assert {path.name for path in tmp_path.iterdir() if path.suffix == ".db"} == {
        "host-a.db",
        "host-b.db",
        "text.db",
        "newer.db",
    }


def test_an_existing_file_is_not_touched(two, tmp_path):
    before = two[1].read_bytes()
    with pytest.raises(StorageFailed, match="exists already"):
        merge(two, two[1])
    assert two[1].read_bytes() == before
