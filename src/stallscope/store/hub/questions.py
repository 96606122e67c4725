"""Answers the named questions (the files in store/sql/hub/) over a snapshot of a tenant's data."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import duckdb
import pyarrow as pa

from stallscope.errors import NotFound
from stallscope.store.hub import views
from stallscope.store.hub.hot import Snapshot
from stallscope.store.hub.job_filter import MEMBERS, JobFilter
from stallscope.store.hub.lateness import NAME as SEALED_LATENESS
from stallscope.store.hub.lateness import SealedLateness
from stallscope.store.hub.ledgers import NAME as SEALED_LEDGERS
from stallscope.store.hub.ledgers import SealedLedgers
from stallscope.store.hub.limits import Limits


class Questions:
    """An engine for questions, and the sums of sealed files that it has computed. Thread-safe."""

    def __init__(self, folder: Path, limits: Limits):
        """folder: the paths of segments are relative to it."""
        self._folder = folder
        self.lateness = SealedLateness(folder, question_text(SEALED_LATENESS))
        self.ledgers = SealedLedgers(folder, question_text(SEALED_LEDGERS))
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


def question_text(name: str) -> str:
    """The SQL of a named question. Raises NotFound."""
    path = files("stallscope.store").joinpath("sql", "hub", f"{name}.sql")
    if not name.isidentifier() or not path.is_file():
        raise NotFound(f"unknown question {name!r}")
    return path.read_text()
