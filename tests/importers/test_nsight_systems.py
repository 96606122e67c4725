"""Nsight Systems exports: the same answer as from the torch.profiler trace of the same job.

The tables follow the SQLite Schema Reference of Nsight Systems 2023.1 to 2026.1.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stallscope.importers import importer_for
from stallscope.importers.nsight_systems import IMPORTER
from stallscope.store import node

from ..diagnose.reports import only, report_of
from .test_profile_variants import LATE, LATE_RANK, LATE_US
from .test_profiler_trace import BASE_NS, N_RANKS, N_STEPS, profiles

SHAPES = ("full", "no process ids", "short names", "no session start")


def tables(db: sqlite3.Connection, shape: str) -> None:
    name = "shortName INTEGER" if shape == "short names" else "demangledName INTEGER, shortName INTEGER"
    process = "" if shape == "no process ids" else ", globalPid INTEGER"
    thread = "" if shape == "no process ids" else ", globalTid INTEGER"
    db.executescript(
        f"""CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
            correlationId INTEGER, {name}{process});
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, correlationId INTEGER,
            nameId INTEGER{thread});
        CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER);
        CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);"""
    )
    if shape != "no session start":
        db.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER)")
        db.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", (BASE_NS,))


def insert(db: sqlite3.Connection, table: str, row: dict[str, Any]) -> None:
    has = {column[1] for column in db.execute(f"PRAGMA table_info({table})")}
    kept = {key: value for key, value in row.items() if key in has}
    marks = ", ".join("?" * len(kept))
    db.execute(f"INSERT INTO {table} ({', '.join(kept)}) VALUES ({marks})", list(kept.values()))


def add(db: sqlite3.Connection, file: dict[str, Any], rank: int) -> None:
    """One rank's events as rows."""
    numbers = {text: number for number, text in db.execute("SELECT id, value FROM StringIds")}
    pid = 4000 + rank
    for event in file["traceEvents"]:
        if event.get("cat") not in ("kernel", "cuda_runtime"):
            continue
        name = event["name"] + ("_v7000" if event["cat"] == "cuda_runtime" else "")
        if name not in numbers:
            numbers[name] = len(numbers)
            db.execute("INSERT INTO StringIds VALUES (?, ?)", (numbers[name], name))
        begin = round(event["ts"] * 1000)
        row = {"start": begin, "end": begin + round(event["dur"] * 1000)}
        row["correlationId"] = event.get("args", {}).get("correlation", 0)
        row["globalPid"], row["globalTid"] = pid << 24, pid << 24 | 17
        if event["cat"] == "kernel":
            row |= {
                "deviceId": rank % 2,
                "streamId": 28,
                "demangledName": numbers[name],
                "shortName": numbers[name],
            }
            insert(db, "CUPTI_ACTIVITY_KIND_KERNEL", row)
        else:
            insert(db, "CUPTI_ACTIVITY_KIND_RUNTIME", row | {"nameId": numbers[name]})


def written(folder: Path, shape: str, ranks_per_file: int = 1, n_steps: int = 0) -> Path:
    folder.mkdir()
    files = profiles(LATE)
    for first in range(0, N_RANKS, ranks_per_file):
        path = folder / (f"rank{first}.sqlite" if ranks_per_file == 1 else f"report{first}.sqlite")
        with closing(sqlite3.connect(path)) as db, db:
            tables(db, shape)
            for rank in range(first, first + ranks_per_file):
                add(db, files[rank], rank)
            db.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', ?)", (f"host{first // 2}",))
            for i in range(n_steps):
                db.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, NULL)", (i * 1000, i * 1000 + 9, f"step {i}")
                )
    return folder


@pytest.mark.parametrize("shape", SHAPES)
def test_the_late_rank_is_named(tmp_path: Path, shape: str):
    folder = written(tmp_path / "job", shape)
    assert importer_for(folder) is IMPORTER
    trace = IMPORTER.read(folder)
    assert len(np.unique(trace.collectives["seq"])) == N_STEPS
    assert not trace.coverage.gaps
    node.write(tmp_path / "trace.db", trace)
    verdict = only(report_of(node.read(tmp_path / "trace.db")))
    assert (verdict.kind, verdict.ranks) == ("straggler", [LATE_RANK])
    assert verdict.late_ms is not None
    assert verdict.late_ms["median"] == pytest.approx(LATE_US / 1e3, rel=0.05)


def test_several_ranks_in_one_report(tmp_path: Path):
    trace = IMPORTER.read(written(tmp_path / "job", "full", ranks_per_file=N_RANKS))
    assert len(trace.processes) == N_RANKS
    assert len(np.unique(trace.collectives["seq"])) == N_STEPS


def test_nvtx_ranges_become_steps(tmp_path: Path):
    rows = IMPORTER.read(written(tmp_path / "job", "full", n_steps=3)).annotations
    assert {row["value"] for row in rows if row["label"] == b"step"} == {b"0", b"1", b"2"}
    assert rows["ts_ns"].min() == BASE_NS


def test_a_report_of_one_rank_leaves_the_answer_open(tmp_path: Path):
    folder = written(tmp_path / "job", "full")
    assert IMPORTER.read(folder / "rank0.sqlite").coverage.gaps
