"""The node trace: written rows can be read by any process at any time, and reading never changes them."""

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stallscope.errors import BadTrace, NewerSchema, NotFound, StorageFailed
from stallscope.events import layout
from stallscope.events.layout import ARRAYS, COLLECTIVES, UNKNOWN
from stallscope.events.trace import Clock, Coverage, Gap, Trace, WallClock
from stallscope.store import node
from stallscope.store.node import NodeTrace

from ..diagnose.builders import MS, dp_trace, every

NOBODY = 65534


def full_trace() -> Trace:
    """A trace with rows in every table, two nodes, clocks and losses."""
    trace = dp_trace(every(2, 7, 50 * MS), node=(0, 0, 1, 1), offset_ns=(0, 7 * MS))
    rng = np.random.default_rng(0)
    tables = {}
    for table in (layout.CALLS, layout.OFFCPU, layout.COMMUNICATORS, layout.SPANS, layout.HOST_EVENTS):
        rows = layout.empty(table, 5)
        rows["ts_ns"] = np.sort(rng.integers(1, 10**12, 5))
        rows["node"], rows["pid"] = [0, 1, 0, 1, 1], 1000
        tables[table.name] = rows
    tables["calls"]["symbol"] = [1, 2, 1, 0, 2]
    tables["communicators"]["comm_hash"] = 2**64 - 5
    tables["host_events"]["file"], tables["host_events"]["cgroup"] = b"/ckpt/7", 2**64 - 9
    clocks = (*trace.clocks, Clock(1, 5, 6, 7))
    symbols = ("", "cudaMalloc", "cudaFree")
    return replace(
        trace, **tables, symbols=symbols, clocks=clocks, lost={"arrival": 3, "call": 1}, facts={"a": "b"}
    )


def assert_same(trace: Trace, other: Trace) -> None:
    for table in ARRAYS:
        rows = getattr(other, table.name)
        order = np.argsort(rows["ts_ns"], kind="stable")
        np.testing.assert_array_equal(getattr(trace, table.name), rows[order], err_msg=table.name)
    for name in ("nodes", "symbols", "lost", "ends_ns", "source", "facts"):
        assert getattr(trace, name) == getattr(other, name), name
    assert sorted(trace.clocks, key=str) == sorted(other.clocks, key=str)


def state_of(path: Path) -> tuple[str, int, int]:
    return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns, path.stat().st_mode


def rows_at(*times_ns: int) -> np.ndarray:
    rows = layout.empty(COLLECTIVES, len(times_ns))
    rows["ts_ns"], rows["node"] = times_ns, 1
    return rows


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "trace.db"
    node.write(path, full_trace())
    return path


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter and list; skips where the tests cannot become another user."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    folder = Path(tempfile.mkdtemp(prefix="stallscope-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


READ_AS_NOBODY = f"""
import os, sys; from pathlib import Path; from stallscope.store import node
node.read(Path(sys.argv[1]))  # imports all it needs while that may be read
os.setuid({NOBODY})
print(len(node.read(Path(sys.argv[2])).collectives))
"""


def read_as_nobody(path: Path, readable: Path) -> subprocess.CompletedProcess[str]:
    """Reads a trace in a process that has given up root."""
    command = [sys.executable, "-c", READ_AS_NOBODY, str(readable), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_everything_comes_back(db):
    assert_same(node.read(db), full_trace())


def test_reading_does_not_change_the_file(db):
    db.chmod(0o640)
    before = state_of(db)
    for _ in range(3):
        node.read(db)
        node.read(db, 10**9)
    assert state_of(db) == before


def test_the_trace_opens_with_any_sqlite(db):
    with closing(sqlite3.connect(db)) as plain:
        assert plain.execute("SELECT COUNT(*) FROM collectives").fetchone()[0] == len(
            full_trace().collectives
        )
        assert plain.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert plain.execute("SELECT version FROM schema_version").fetchall() == [(node.SCHEMA_VERSION,)]
        assert plain.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_since_counts_from_the_newest_event_of_each_node(db):
    whole, part = node.read(db), node.read(db, 100 * MS)
    for number in (0, 1):
        rows = whole.collectives[whole.collectives["node"] == number]
        newest = max(rows["ts_ns"].max(), whole.snapshots["ts_ns"][whole.snapshots["node"] == number].max())
        spans = whole.spans[whole.spans["node"] == number]
        newest = max(newest, spans["ts_ns"].max())
        kept = part.collectives[part.collectives["node"] == number]
        np.testing.assert_array_equal(kept, rows[rows["ts_ns"] >= newest - 100 * MS])
    np.testing.assert_array_equal(part.processes, whole.processes)


def test_a_read_only_copy_in_a_read_only_folder_is_read(open_folder, db):
    copy = open_folder / "copy.db"
    shutil.copy(db, copy)
    copy.chmod(0o444)
    before = state_of(copy)
    done = read_as_nobody(copy, db)
    assert (done.stdout.strip(), done.stderr) == (str(len(full_trace().collectives)), "")
    assert state_of(copy) == before
    assert list(open_folder.iterdir()) == [copy]


def test_a_live_trace_is_read_without_permission_to_write(open_folder, db):
    path = open_folder / "live.db"
    writer = NodeTrace(path)
    writer.node("here")
    writer.append(COLLECTIVES, rows_at(1, 2, 3))
    writer.commit()
    done = read_as_nobody(path, db)
    assert (done.stdout.strip(), done.stderr) == ("3", "")
    writer.append(COLLECTIVES, rows_at(4))
    writer.close()
    assert len(node.read(path).collectives) == 4


def test_the_files_of_a_killed_writer_are_read_without_write_permission(open_folder, db):
    path = open_folder / "left.db"
    writer = NodeTrace(path)
    writer.node("here")
    writer.append(COLLECTIVES, rows_at(1, 2, 3))
    writer.commit()
    for suffix in ("", "-wal", "-shm"):
        shutil.copy(f"{path}{suffix}", f"{path}.copy{suffix}")
    writer.close()
    done = read_as_nobody(open_folder / "left.db.copy", db)
    assert (done.stdout.strip(), done.stderr) == ("3", "")


def test_a_file_that_may_not_be_read_is_one_clear_error(open_folder, db):
    secret = open_folder / "secret.db"
    shutil.copy(db, secret)
    secret.chmod(0o600)
    done = read_as_nobody(secret, db)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("stallscope.errors.BadTrace")
    assert "unable to open" in line


def test_readers_get_the_committed_rows_of_an_active_writer(tmp_path):
    path = tmp_path / "live.db"
    writer = NodeTrace(path)
    writer.node("here")
    writer.append(COLLECTIVES, rows_at(1, 2, 3))
    assert len(node.read(path).collectives) == 0
    writer.commit()
    assert node.read(path).collectives["ts_ns"].tolist() == [1, 2, 3]
    writer.append(COLLECTIVES, rows_at(4))
    assert len(node.read(path).collectives) == 3
    writer.commit()
    assert len(node.read(path).collectives) == 4
    writer.close()
    assert len(node.read(path).collectives) == 4


def test_a_new_trace_has_its_tables_as_soon_as_its_file_exists(tmp_path):
    paths = [tmp_path / f"{number}.db" for number in range(20)]
    is_waiting = threading.Barrier(2)

    def read_as_early_as_possible() -> list[str]:
        errors = []
        for path in paths:
            is_waiting.wait(timeout=60)
            while not path.exists():
                pass
            try:
                node.read(path)
            except BadTrace as error:
                errors.append(str(error))
        return errors

    with ThreadPoolExecutor() as pool:
        reader = pool.submit(read_as_early_as_possible)
        for path in paths:
            is_waiting.wait(timeout=60)
            NodeTrace(path).close()
        assert reader.result() == []
    assert not list(tmp_path.glob(".*"))


def test_an_empty_file_becomes_a_trace_when_it_is_written_and_is_refused_before(tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(BadTrace, match="not a stallscope trace: the file is empty"):
        node.read(path)
    NodeTrace(path).close()
    assert len(node.read(path).collectives) == 0


def test_a_reader_does_not_hold_up_the_writer(tmp_path):
    path = tmp_path / "live.db"
    writer = NodeTrace(path)
    writer.node("here")
    writer.append(COLLECTIVES, rows_at(1))
    writer.commit()
    with node.reading(path) as reader:
        cursor = reader.execute("SELECT ts_ns FROM collectives")
        writer.append(COLLECTIVES, rows_at(2))
        writer.commit()
        assert cursor.fetchone() == (1,)
    assert len(node.read(path).collectives) == 2
    writer.close()


def test_a_connection_for_reading_cannot_write(db):
    with node.reading(db) as reader:
        for statement in ("DELETE FROM collectives", "CREATE TABLE x (y)", "UPDATE nodes SET name='x'"):
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                reader.execute(statement)


WRITE_UNTIL_KILLED = """
import sys, time; from pathlib import Path; import numpy as np
from stallscope.events import layout; from stallscope.store.node import NodeTrace
store = NodeTrace(Path(sys.argv[1])); store.node("here")
for i in range(10**6):
    rows = layout.empty(layout.COLLECTIVES, 100); rows["ts_ns"] = np.arange(100) + 100 * i; rows["node"] = 1
    store.append(layout.COLLECTIVES, rows); store.commit()
    if i == 20: print("written", flush=True)
"""


def test_a_killed_writer_leaves_a_readable_trace(tmp_path):
    path = tmp_path / "killed.db"
    with subprocess.Popen([sys.executable, "-c", WRITE_UNTIL_KILLED, str(path)], stdout=-1) as writer:
        assert writer.stdout.readline() == b"written\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
    kept = node.read(path).collectives["ts_ns"]
    assert len(kept) >= 2000
    assert len(kept) % 100 == 0, "only whole commits are kept"
    np.testing.assert_array_equal(kept, np.arange(len(kept)))
    again = NodeTrace(path)
    again.append(COLLECTIVES, rows_at(10**9))
    again.close()
    assert len(node.read(path).collectives) == len(kept) + 1


def test_import_never_touches_an_existing_file(db):
    before = state_of(db)
    with pytest.raises(StorageFailed, match="exists already"):
        node.write(db, dp_trace())
    assert state_of(db) == before


def test_a_failed_import_leaves_no_files(tmp_path):
    broken = full_trace()
    broken.collectives["node"] = 9  # no such node
    with pytest.raises(IndexError):
        node.write(tmp_path / "new.db", broken)
    assert list(tmp_path.iterdir()) == []


def test_a_new_trace_that_cannot_be_created_is_named_as_given(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed, match=r"^cannot write \S+/file/new\.db: "):
        node.write(tmp_path / "file/new.db", dp_trace())


def test_an_import_leaves_one_file(tmp_path):
    node.write(tmp_path / "new.db", dp_trace())
    assert [path.name for path in tmp_path.iterdir()] == ["new.db"]


def test_two_traces_in_one_file_keep_their_nodes_apart(tmp_path):
    entry, other = (
        dp_trace(n_steps=3),
        replace(dp_trace(n_steps=4), nodes=("host-z",), symbols=("", "cudaFree")),
    )
    store = NodeTrace(tmp_path / "both.db")
    node.add(store, entry)
    node.add(store, other)
    store.close()
    both = node.read(tmp_path / "both.db")
    assert both.nodes == ("host-a", "host-z")
    counts = np.bincount(both.collectives["node"])
    assert counts.tolist() == [len(entry.collectives), len(other.collectives)]


def test_pruning_deletes_the_oldest_rows_and_keeps_processes(tmp_path):
    trace = dp_trace(n_steps=2000, n_ranks=2)
    store = NodeTrace(tmp_path / "pruned.db")
    node.add(store, trace)
    limit = 400_000
    assert store.prune(limit) > 0
    store.commit()
    left = node.read(tmp_path / "pruned.db")
    store.close()
    assert 0 < len(left.collectives) < len(trace.collectives)
    assert left.collectives["ts_ns"].max() == trace.collectives["ts_ns"].max()
    np.testing.assert_array_equal(left.collectives, trace.collectives[-len(left.collectives) :])
    assert len(left.processes) == 2
    assert (tmp_path / "pruned.db").stat().st_size <= limit


@pytest.mark.parametrize(
    ("before_ns", "owners_before_ns", "pids"),
    [
        (None, 120, [8, 9]),
        (None, 1000, [8]),
        (120, None, [8, 9]),
        (1000, 50, [7, 8, 9]),
    ],
    ids=["own age", "all ended", "with the other rows", "longer than the other rows"],
)
def test_owners_of_ended_processes_are_deleted_by_their_own_age(tmp_path, before_ns, owners_before_ns, pids):
    """The processes 7 and 9 have ended; process 8 runs, and its owner is kept."""
    store = NodeTrace(tmp_path / "owners.db")
    processes, owners = layout.empty(layout.PROCESSES, 3), layout.empty(layout.OWNERS, 3)
    processes["pid"], processes["ended_ns"] = [7, 8, 9], [110, layout.UNKNOWN, 210]
    owners["pid"], owners["ts_ns"], owners["owner_user"] = [7, 8, 9], [100, 100, 140], b"ann"
    node.add(store, Trace(processes=processes, owners=owners, nodes=("host-a",)))
    store.prune(0, before_ns=before_ns, owners_before_ns=owners_before_ns)
    store.close()
    assert sorted(node.read(tmp_path / "owners.db").owners["pid"].tolist()) == pids


def test_pruning_a_small_trace_deletes_no_rows(db):
    store = NodeTrace(db)
    assert store.prune(10**9) == 0
    store.close()
    assert_same(node.read(db), full_trace())


def test_ends_of_processes_and_communicators_are_noted(tmp_path):
    trace = full_trace()
    path = tmp_path / "ends.db"
    store = NodeTrace(path)
    node.add(store, trace)
    store.process_ended(2, 1002, 5_000)
    store.process_ended(2, 1002, 9_000)  # the first end counts
    store.communicator_ended(2, 1000, 2**64 - 5, ended_ns=6_000)
    store.close()
    result = node.read(path)
    assert result.processes["ended_ns"][result.processes["pid"] == 1002].tolist() == [5_000]
    ended = result.communicators["ended_ns"]
    assert sorted(ended[result.communicators["node"] == 1].tolist()) == [6_000] * 3
    assert set(ended[result.communicators["node"] == 0].tolist()) == {-1}


def test_a_trace_is_read_as_of_one_moment(tmp_path, monkeypatch):
    """An agent writes its node, then rows of it, after the reader has looked for nodes."""
    path = tmp_path / "live.db"
    store, read_table = NodeTrace(path), node._read_table

    def later(db, table):
        if not store_rows:
            rows = layout.empty(layout.PROCESSES, 1)
            rows["node"], rows["pid"] = store.node("here"), 7
            store.append(layout.PROCESSES, rows)
            store.commit()
            store_rows.append(rows)
        return read_table(db, table)

    store_rows = []
    store.commit()
    monkeypatch.setattr(node, "_read_table", later)
    assert len(node.read(path).processes) == 0
    assert len(node.read(path).processes) == 1
    store.close()


def test_rank_and_gpu_of_a_running_process_may_be_learnt_later(tmp_path):
    path = tmp_path / "later.db"
    store = NodeTrace(path)
    rows = layout.empty(layout.PROCESSES, 2)
    rows["node"], rows["pid"], rows["ended_ns"] = store.node("here"), 7, [5, -1]
    rows["rank"] = rows["nranks"] = rows["device"] = -1
    store.append(layout.PROCESSES, rows)
    store.process_rank_known(int(rows["node"][0]), 7, 3, nranks=8)
    store.process_device_known(int(rows["node"][0]), 7, 6)
    store.close()
    processes = node.read(path).processes
    assert sorted(processes[["rank", "nranks", "device"]].tolist()) == [(-1, -1, -1), (3, 8, 6)]


def test_names_of_functions_are_numbered_once(tmp_path):
    store = NodeTrace(tmp_path / "symbols.db")
    first = store.symbol("cudaMalloc")
    assert (store.symbol("cudaFree"), store.symbol("cudaMalloc")) == (first + 1, first)
    store.close()
    again = NodeTrace(tmp_path / "symbols.db")
    assert again.symbol("cudaFree") == first + 1
    again.close()


def test_a_newer_schema_is_refused_by_readers_and_writers(db):
    with closing(sqlite3.connect(db)) as plain, plain:
        plain.execute("INSERT INTO schema_version VALUES (?, 0)", (node.SCHEMA_VERSION + 1,))
    before = db.read_bytes()
    for use in (node.read, NodeTrace):
        with pytest.raises(NewerSchema, match="upgrade stallscope"):
            use(db)
    assert db.read_bytes() == before


def test_a_trace_of_an_earlier_version_is_read_and_upgraded_on_write(db):
    with closing(sqlite3.connect(db)) as plain, plain:
        for table in layout.NODE_TABLES:
            plain.execute(f"DROP TABLE {table.name}")
        for name in ("max_error_us", "estimated_error_us", "frequency_ppm"):
            plain.execute(f"ALTER TABLE clocks DROP COLUMN {name}")
        plain.execute("UPDATE schema_version SET version = 1")
    without = replace(full_trace(), host_events=layout.empty(layout.HOST_EVENTS))
    assert_same(node.read(db), without)
    node.read(db, 10**9)
    NodeTrace(db).close()
    with closing(sqlite3.connect(db)) as plain:
        there = {name for (name,) in plain.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert {table.name for table in layout.NODE_TABLES} <= there
        versions = [version for (version,) in plain.execute("SELECT version FROM schema_version")]
        assert versions == [1, node.SCHEMA_VERSION]
    assert_same(node.read(db), without)


def test_columns_that_an_earlier_version_lacks_are_unknown_and_added_on_write(db):
    with closing(sqlite3.connect(db)) as plain:
        plain.execute("ALTER TABLE requests DROP COLUMN id_hash")
        columns = [row[1] for row in plain.execute("PRAGMA table_info(requests)")][1:]
        texts = dict.fromkeys(("engine", "model", "method"), "") | {"path": "/v1", "first_ns": None}
        values = [texts.get(name, 1) for name in columns]
        marks = ", ".join("?" * len(columns))
        plain.execute(f"INSERT INTO requests ({', '.join(columns)}) VALUES ({marks})", values)
        plain.commit()
    (row,) = node.read(db).requests
    assert (row["id_hash"], row["first_ns"], row["path"]) == (UNKNOWN, UNKNOWN, b"/v1")
    with closing(NodeTrace(db)) as store:
        new = layout.empty(layout.REQUESTS, 1)
        new["id_hash"], new["ts_ns"], new["node"] = 5, 2, 1
        store.append(layout.REQUESTS, new)
        store.commit()
    assert node.read(db).requests["id_hash"].tolist() == [UNKNOWN, 5]


@pytest.mark.parametrize("n_rows", [1, 2000])
def test_old_rows_are_read_after_an_upgrade_added_columns_without_an_unknown_value(db, n_rows):
    rows = layout.empty(layout.REQUESTS, n_rows)
    rows["ts_ns"], rows["node"], rows["engine"], rows["blocked_ns"] = np.arange(n_rows), 1, b"vllm", 7
    with closing(NodeTrace(db)) as store:
        store.append(layout.REQUESTS, rows)
        store.commit()
    with closing(sqlite3.connect(db)) as plain:
        for name in ("blocked_ns", "engine"):
            plain.execute(f"ALTER TABLE requests DROP COLUMN {name}")
    before = node.read(db).requests
    assert len(before) == n_rows
    assert not before["engine"].any() and not before["blocked_ns"].any()
    NodeTrace(db).close()
    np.testing.assert_array_equal(node.read(db).requests, before)


def test_a_clock_reading_is_kept_with_its_bracket_and_how_well_the_wall_clock_is_kept(tmp_path):
    path = tmp_path / "t.db"
    with closing(NodeTrace(path)) as store:
        store.clock(Clock(0, 5, 6, 7), kernel_clock=WallClock(True, 120, 30, -1.5, 9))
        store.clock(Clock(0, 8, 9, 7))
    with closing(sqlite3.connect(path)) as plain:
        rows = plain.execute(
            "SELECT error_ns, is_synchronised, max_error_us, estimated_error_us, frequency_ppm FROM clocks"
        )
        assert rows.fetchall() == [(7, 1, 120, 30, -1.5), (7, None, None, None, None)]


def test_no_such_trace(tmp_path):
    with pytest.raises(NotFound, match="no trace at"):
        node.read(tmp_path / "none.db")
    with pytest.raises(BadTrace, match="is a folder"):
        node.read(tmp_path)


QUESTIONS = sorted(path.stem for path in (Path(node.__file__).parent / "sql").glob("*.sql"))


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "schema"])
def test_every_question_can_be_asked(db, name):
    text = node.question(name)
    assert text.startswith("-- Question:")
    assert "-- Columns:" in text
    with node.reading(db) as reader:
        assert reader.execute(f"EXPLAIN {text}").fetchall()
        rows = reader.execute(text).fetchall()
    assert rows, "the full trace has an answer to each"


def test_the_coverage_of_a_source_is_stored_and_joined_over_sessions(tmp_path):
    trace = dp_trace()
    gap = Gap("the kernels carry no arguments", "Record again with a newer version.")
    first = replace(trace, coverage=Coverage(("slowness",), {"negative durations": 2}, (gap,)))
    second = replace(trace, coverage=Coverage(("slowness",), {"negative durations": 3}, (gap,)))
    node.write(tmp_path / "t.db", first)
    store = node.NodeTrace(tmp_path / "t.db")
    node.add(store, second)
    store.close()
    assert node.read(tmp_path / "t.db").coverage == Coverage(("slowness",), {"negative durations": 5}, (gap,))


def test_facts_are_json_for_everybody(db):
    with closing(sqlite3.connect(db)) as plain:
        assert [json.loads(facts) for (facts,) in plain.execute("SELECT facts FROM sessions")] == [
            {"a": "b"}
        ] * 2


def test_processes_that_ended_between_two_sessions_are_ended_where_the_first_session_ended(tmp_path: Path):
    trace = dp_trace(every(2, 7, 50 * MS))
    node.write(tmp_path / "t.db", trace)
    with closing(NodeTrace(tmp_path / "t.db")) as store:
        number = store.node(trace.nodes[0])
        pids = trace.processes["pid"].tolist()
        seen: dict[int, int] = {}

        def still_runs(pid: int, first_ns: int) -> bool:
            seen[pid] = first_ns
            return pid == pids[0]

        ended = store.end_unobserved(number, still_runs)
        assert sorted(ended["pid"].tolist()) == sorted(pids[1:])
        assert len(store.end_unobserved(number, lambda pid, first_ns: pid == pids[0])) == 0
        assert len(store.end_unobserved(number + 1, lambda pid, first_ns: False)) == 0
        store.commit()
    again = node.read(tmp_path / "t.db")
    assert seen == dict(zip(pids, trace.processes["ts_ns"].tolist(), strict=True))
    by_pid = dict(zip(again.processes["pid"].tolist(), again.processes["ended_ns"].tolist(), strict=True))
    assert by_pid == {pid: layout.UNKNOWN if pid == pids[0] else trace.ends_ns[0] for pid in pids}
    last = {int(row["pid"]): int(row["alive"]) for row in again.snapshots}
    assert all(last[pid] == (pid == pids[0]) for pid in last)
