"""Answers the named questions (the files in store/sql/hub/) over a snapshot of a tenant's data."""

import json
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from stallscope.errors import NotFound
from stallscope.store.hub import views
from stallscope.store.hub.hot import Snapshot
from stallscope.store.hub.job_filter import MEMBERS, JobFilter
from stallscope.store.hub.lateness import NAME as SEALED_LATENESS
from stallscope.store.hub.lateness import UNMATCHED, SealedLateness
from stallscope.store.hub.ledgers import NAME as SEALED_LEDGERS
from stallscope.store.hub.ledgers import SealedLedgers
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.row_bounds import ALL_ROWS, NO_ROWS, RowBounds, between
from stallscope.store.hub.statement_bounds import TREE, statement_bounds

_START_S = 60.0
"""A question starts within this time after its bounds are computed."""

_OF_SEALED_FILES = {SEALED_LATENESS, SEALED_LEDGERS, UNMATCHED}
"""Relations over the sealed files of collectives in the window of the question."""


class Questions:
    """An engine for questions, and the sums of sealed files that it has computed. Thread-safe."""

    def __init__(self, folder: Path, limits: Limits):
        """folder: the paths of segments are relative to it."""
        self._folder = folder
        self.lateness = SealedLateness(folder, question_text(SEALED_LATENESS))
        self.ledgers = SealedLedgers(folder, question_text(SEALED_LEDGERS))
        self._trees: dict[str, Any] = {}
        self._reader = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": f"{limits.reader_memory_bytes}B",
                "threads": limits.reader_threads,
                "temp_directory": str(folder / "spill-questions"),
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            },
        )

    def close(self) -> None:
        """Release the engine's memory."""
        self._reader.close()

    def bounds(
        self, sql: str, *, params: Mapping[str, object], job: JobFilter | None = None
    ) -> dict[str, RowBounds]:
        """By table, the rows that a question can use."""
        known = statement_bounds(self._tree(sql), params, now_ns=time.time_ns(), within_s=_START_S)
        of_job = between(job.begin_ns, job.end_ns) if job else ALL_ROWS
        out: dict[str, RowBounds] = {}
        for name, bounds in known.items():
            if name in _OF_SEALED_FILES:
                tables, bounds = frozenset({"collectives"}), bounds.both(_window(params))
            else:
                tables = frozenset({"events"}) if name == views.STORED_EVENTS else views.behind((name,))
            for table in tables:
                out[table] = out.get(table, NO_ROWS).either(bounds)
        return {table: out.get(table, ALL_ROWS).both(of_job) for table in views.named(sql)}

    def _tree(self, sql: str) -> Any:
        if sql not in self._trees:
            with self._reader.cursor() as db:
                ((text,),) = db.execute(TREE, [sql]).fetchall()
            self._trees[sql] = json.loads(text)
        return self._trees[sql]

    def answer(
        self,
        sql: str,
        snapshot: Snapshot,
        *,
        params: Mapping[str, object],
        job: JobFilter | None = None,
    ) -> pa.Table:
        """The answer to a question over a snapshot, whose sealed files are in the folder. Raises duckdb.Error.

        job: over the rows of this job only.
        """
        with self._reader.cursor() as db:
            db.execute("SET TimeZone = 'UTC'")
            db.execute(
                "SET enable_progress_bar = false"
            )  # it writes to the hub's output; not an option of connect()
            hot = {}
            for name, rows in snapshot.hot.items():
                hot[name] = f"hot_{name}"
                db.register(hot[name], rows)
            shown = dict(snapshot.segments)
            if job:
                db.register(MEMBERS, job.members)
            sums: SealedLateness | SealedLedgers
            for name, sums in ((SEALED_LATENESS, self.lateness), (SEALED_LEDGERS, self.ledgers)):
                if name in sql:
                    sealed = shown.get("collectives", ())
                    shown["collectives"] = sums.prepare(db, sealed, params, is_summed=job is None)
            paths = {name: [str(self._folder / s.path) for s in segments] for name, segments in shown.items()}
            for statement in views.statements(paths, hot, only=views.named(sql), job=job):
                db.execute(statement)
            return db.sql(sql, params=dict(params)).to_arrow_table()


def _window(params: Mapping[str, object]) -> RowBounds:
    first, end = params.get("from_ns"), params.get("to_ns")
    return between(first if isinstance(first, int) else None, end if isinstance(end, int) else None)


def question_text(name: str) -> str:
    """The SQL of a named question. Raises NotFound."""
    path = files("stallscope.store").joinpath("sql", "hub", f"{name}.sql")
    if not name.isidentifier() or not path.is_file():
        raise NotFound(f"unknown question {name!r}")
    return path.read_text()
