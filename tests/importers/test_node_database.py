"""Databases of another node agent: valid data is read, invalid data is reported."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.errors import BadTrace
from stallscope.events.names import Category, Op
from stallscope.importers import importer_for
from stallscope.importers.functions import op_of
from stallscope.importers.node_database import IMPORTER
from stallscope.store import node

from ..diagnose.reports import only, report_of

EVENTS = "id, timestamp, pid, tid, source, op, duration, arg0, ret_code"
OPS = [(1, 1, "cudaMalloc"), (1, 5, "cudaStreamSync"), (3, 1, "sched_switch"), (5, 2, "block_write")]


def database(path: Path, events: list[tuple[object, ...]]) -> Path:
    """A database of that agent with these events."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"CREATE TABLE events ({EVENTS})")
        db.execute("CREATE TABLE ops (source_id, op_id, name)")
        db.executemany("INSERT INTO ops VALUES (?, ?, ?)", OPS)
        db.executemany(f"INSERT INTO events VALUES ({','.join('?' * 9)})", events)
    return path


def test_calls_and_switches_become_rows(tmp_path):
    path = database(
        tmp_path / "a.db",
        [
            (1, 1000, 7, 8, 1, 1, 50, 4096, 2),
            (2, 5000, 7, 8, 3, 1, 3000, 0, 0),
            (3, 6000, 9, 9, 5, 2, 10, 0, 0),
        ],
    )
    importer = importer_for(path)
    assert importer is IMPORTER
    trace = importer.read(path)
    (call,) = trace.calls
    assert (call["ts_ns"], call["duration_ns"], call["pid"], call["tid"]) == (1000, 50, 7, 8)
    assert (Op(call["op"]), call["count_bytes"], call["result"]) == (Op.ALLOC, 4096, 2)
    assert trace.symbols[call["symbol"]] == "cudaMalloc"
    (off,) = trace.offcpu
    assert (off["ts_ns"], off["duration_ns"], off["category"]) == (2000, 3000, Category.OTHER_OFF)
    node.write(tmp_path / "out.db", trace)
    assert len(node.read(tmp_path / "out.db").calls) == 1


@pytest.mark.shared
def test_the_starved_loop_is_named_and_its_first_launch_is_not(shared, tmp_path):
    path = shared / "public" / "node-databases" / "pytorch-dataloader-starvation.db"
    report = report_of(importer_for(path).read(path))
    verdict = only(report)
    assert (verdict.kind, verdict.causes[0].cause.name) == ("process", "input_starvation")
    assert verdict.evidence.pid == 2233
    assert verdict.evidence.typical_step_ms == pytest.approx(62, rel=0.05)
    assert 6200 <= verdict.evidence.step_ms_late <= 6600
    assert any("first cudaLaunchKernel" in remark["what"] for remark in report.benign)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["sample-gpu-node-02.db", "sample-cluster.db"])
def test_a_database_without_sufficient_data_is_inconclusive(shared, name):
    path = shared / "public" / "node-databases" / name
    report = report_of(importer_for(path).read(path))
    assert report.answer == "inconclusive"
    assert not [verdict for verdict in report.verdicts if verdict.ranks]


@pytest.mark.parametrize(
    "event",
    [
        (1, -5, 7, 7, 1, 1, 50, 0, 0),
        (1, 5, -7, 7, 1, 1, 50, 0, 0),
        (1, 5, 7, 7, 1, 1, -50, 0, 0),
        (1, "x", 7, 7, 1, 1, 50, 0, 0),
        (1, None, 7, 7, 1, 1, 50, 0, 0),
        (1, 2**62, 7, 7, 1, 1, 2**62, 0, 0),
        (1, 5, 2**40, 7, 1, 1, 50, 0, 0),
        (1, 5, 7, 7, b"\xff", 1, 50, 0, 0),
    ],
)
def test_nonsense_is_refused_in_one_line(tmp_path, event):
    path = database(tmp_path / "bad.db", [event])
    with pytest.raises(BadTrace) as caught:
        importer_for(path).read(path)
    assert "bad.db" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_our_own_trace_and_a_view_are_not_taken(tmp_path):
    with closing(sqlite3.connect(tmp_path / "view.db")) as db, db:
        db.execute("CREATE VIEW events AS SELECT 1 AS timestamp")
        db.execute("CREATE TABLE ops (source_id, op_id, name)")
    with pytest.raises(BadTrace, match="an SQLite file without"):
        importer_for(tmp_path / "view.db")


@settings(max_examples=60)
@given(position=st.floats(0, 1), junk=st.binary(min_size=1, max_size=64))
def test_a_damaged_file_is_an_error_or_a_trace(tmp_path, position, junk):
    path = database(
        tmp_path / f"{abs(hash((position, junk)))}.db", [(i, i, 7, 7, 1, 1, 5, 0, 0) for i in range(200)]
    )
    content = bytearray(path.read_bytes())
    at = int(position * (len(content) - len(junk)))
    content[at : at + len(junk)] = junk
    path.write_bytes(content)
    if IMPORTER.sniff(path):
        try:
            IMPORTER.read(path)
        except BadTrace as error:
            assert "\n" not in str(error)


def test_a_table_name_with_invalid_text_is_refused(tmp_path):
    path = database(tmp_path / "a.db", [])
    content = path.read_bytes()
    wrong = content.replace(b"tableopsops", b"tableo\x91so\x91s").replace(
        b"CREATE TABLE ops", b"CREATE TABLX ops"
    )
    path.write_bytes(wrong)
    assert not IMPORTER.sniff(path)
    with pytest.raises(BadTrace, match=r"a\.db"):
        IMPORTER.read(path)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("cuMemAllocManaged", Op.ALLOC),
        ("cudaFree", Op.FREE),
        ("cudaMemcpyAsync", Op.COPY),
        ("cudaGraphLaunch", Op.GRAPH_LAUNCH),
        ("cuLaunchKernel", Op.LAUNCH),
        ("cuCtxSynchronize", Op.SYNC),
        ("ncclAllReduce", Op.NONE),
    ],
)
def test_functions_have_their_class(name, op):
    assert op_of(name) is op
