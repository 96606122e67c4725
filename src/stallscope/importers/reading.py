"""Reads files of several kinds together: each file by the importer for its content, into the fewest possible traces.

Logs and stack dumps state facts on ranks; where another source measured the same ranks, the statements are added to
its trace. Files that cannot be read are listed with the reason; a single unreadable file among others is not an error.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from stallscope.errors import BadTrace, NotFound
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Coverage, Gap, Trace
from stallscope.importers.rank_statements import Statements
from stallscope.importers.registry import importers, why_unknown
from stallscope.importers.statement_trace import statement_trace
from stallscope.importers.texts import files_of, head_of

_MAX_NAMED = 20


@dataclass
class Reading:
    """traces: one per kind of measured source. used: kinds with their number of files. unread: file and reason."""

    traces: list[Trace] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)
    unread: list[tuple[Path, str]] = field(default_factory=list)

    def unread_lines(self) -> list[str]:
        """The files that could not be read, in words, the first few."""
        lines = [f"{path} {reason}" for path, reason in self.unread[:_MAX_NAMED]]
        more = len(self.unread) - _MAX_NAMED
        return [*lines, f"{more:,} more files could not be read"] if more > 0 else lines


def read_files(paths: Sequence[Path]) -> Reading:
    """All files and folders, at any depth. Raises NotFound: no such path; BadTrace: not one file could be read."""
    if missing := next((path for path in paths if not path.exists()), None):
        raise NotFound(f"{missing} does not exist: check the path")
    reading = Reading()
    by_kind, statement_files = _assigned(paths, reading)
    statements = Statements()
    for importer in importers():
        if importer.collect and (files := statement_files.get(importer.name)):
            importer.collect(files, statements)
            reading.used[importer.name] = len(files)
    for importer in importers():
        for source in by_kind.get(importer.name, []):
            try:
                reading.traces.append(importer.read(source, reading.unread))
                n_files = 1 if isinstance(source, Path) else len(source)
                reading.used[importer.name] = reading.used.get(importer.name, 0) + n_files
            except (BadTrace, NotFound) as error:
                first = source if isinstance(source, Path) else source[0]
                reading.unread.append((first, str(error).removeprefix(f"{first} ")))
    if statements.sources:
        _add_statements(reading, statements)
    if not reading.traces:
        raise BadTrace(_why_nothing(paths, reading))
    if reading.unread:
        reading.traces[0] = _with_gap(reading.traces[0], reading.unread)
    return reading


def _why_nothing(paths: Sequence[Path], reading: Reading) -> str:
    """The reason why not one file could be read: the reasons of damaged files before files of no known kind."""
    damaged = [(path, reason) for path, reason in reading.unread if reason != why_unknown(path)]
    if not damaged and paths[0].is_dir():
        return f"{', '.join(map(str, paths[:4]))} {why_unknown(paths[0])}"
    return "; ".join(f"{path} {reason}" for path, reason in (damaged or reading.unread)[:4])


def _with_gap(trace: Trace, unread: list[tuple[Path, str]]) -> Trace:
    names = ", ".join(path.name for path, _ in unread[:4])
    gap = Gap(f"{len(unread)} files could not be read ({names})", "Give these files in a readable form.")
    return replace(trace, coverage=Coverage.joined([trace.coverage, Coverage(gaps=(gap,))]))


def _assigned(
    paths: Sequence[Path], reading: Reading
) -> tuple[dict[str, list[Path | list[Path]]], dict[str, list[Path]]]:
    """The sources of each measuring importer, and the files of each importer of statements."""
    folders = [importer for importer in importers() if importer.takes_folders]
    measuring = [importer for importer in importers() if not importer.takes_folders and not importer.collect]
    by_kind: dict[str, list[Path | list[Path]]] = {}
    statement_files: dict[str, list[Path]] = {}
    whole = [
        (folder, importer)
        for path in paths
        for folder in _folders(path)
        for importer in folders
        if importer.accepts(folder, b"")
    ]
    for folder, importer in whole:
        by_kind.setdefault(importer.name, []).append(folder)
    taken = [folder for folder, _ in whole]
    plain: dict[str, list[Path]] = {}
    for file in files_of(list(paths)):
        if any(folder in file.parents for folder in taken):
            continue
        head = head_of(file)
        if kind := next((importer for importer in measuring if importer.accepts(file, head)), None):
            plain.setdefault(kind.name, []).append(file)
            continue
        stating = [i for i in importers() if i.collect and i.accepts(file, head)]
        for importer in stating:
            statement_files.setdefault(importer.name, []).append(file)
        if not stating:
            reading.unread.append((file, why_unknown(file)))
    for name, files in plain.items():
        by_kind.setdefault(name, []).append(files)
    return by_kind, statement_files


def _folders(path: Path) -> list[Path]:
    return [Path(parent) for parent, _, _ in os.walk(path)] if path.is_dir() else []


def _add_statements(reading: Reading, statements: Statements) -> None:
    """Add the statements of logs and stacks to the first trace of the same ranks, or as a separate trace."""
    stated = statement_trace(statements)
    ranks = set(stated.launcher_ranks().values()) - {UNKNOWN}
    base = next(
        (i for i, trace in enumerate(reading.traces) if ranks & set(trace.launcher_ranks().values())), None
    )
    if base is None:
        reading.traces.append(stated)
    else:
        reading.traces[base] = combined(reading.traces[base], stated)


def combined(base: Trace, stated: Trace) -> Trace:
    """A measured trace with the statements on its ranks: stacks, failures and words of calls."""
    measured = {rank: process for process, rank in base.launcher_ranks().items()}
    moved = {process: measured[rank] for process, rank in stated.launcher_ranks().items() if rank in measured}
    first_stack = max(base.stacks, default=-1) + 1
    positions = _moved(stated.positions, moved)
    positions["stack"] = np.where(
        positions["stack"] >= 0, positions["stack"] + first_stack, positions["stack"]
    )
    last_ns = int(base.collectives["ts_ns"].max(initial=0))
    positions["ts_ns"] = np.maximum(positions["ts_ns"], last_ns + 1)
    return replace(
        base,
        positions=np.concatenate([base.positions, positions]),
        annotations=np.concatenate([base.annotations, _moved(stated.annotations, moved)]),
        stacks=base.stacks | {number + first_stack: frames for number, frames in stated.stacks.items()},
        source=f"{base.source}; {stated.source}",
        facts=stated.facts | base.facts,
        coverage=Coverage.joined([base.coverage, replace(stated.coverage, gaps=())]),
    )


def _moved(rows: Array, process: dict[tuple[int, int], tuple[int, int]]) -> Array:
    """Rows with the processes of another trace; rows of processes that it lacks stay unranked."""
    out = rows.copy()
    for row in out:
        row["node"], row["pid"] = process.get((int(row["node"]), int(row["pid"])), (0, 1 << 30))
    return out
