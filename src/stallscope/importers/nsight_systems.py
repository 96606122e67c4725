"""Nsight Systems reports as SQLite (nsys export --type sqlite): CUDA calls, kernels, NVTX ranges of one or more ranks.

The tables follow the exporter of 2023.1 to 2026.1 (docs: SQLite Schema Reference); columns that a version lacks are
unknown. A report may hold several processes: each that launched a communication kernel is a rank, numbered by the
file's name if it is the only process, otherwise by its device. NCCL kernels name no group: see profile_rounds. NVTX
ranges with a text such as "step 12" or "iteration 12" are steps.
"""

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events.counted import counted
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Op
from stallscope.events.trace import Trace
from stallscope.importers.file_ranks import named_rank, ranks_in_name
from stallscope.importers.functions import op_of
from stallscope.importers.profile_trace import trace_of
from stallscope.importers.rank_profile import CALL, KERNEL, STEP, Collective, Profile, op_of_kernel
from stallscope.importers.registry import Importer, Unread, each_readable

_MAGIC = b"SQLite format 3\0"
_KERNELS, _CALLS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_STEP = re.compile(
    r"^(?:ProfilerStep#|(?:train(?:ing)?[ _])?(?:step|iter(?:ation)?)[ _#:=]*)(\d{1,12})$", re.IGNORECASE
)
_MAX_ROWS = 20_000_000
_NOT_PID = (1 << 24) - 1


def _accepts(file: Path, head: bytes) -> bool:
    if head[: len(_MAGIC)] != _MAGIC:
        return False
    try:
        with closing(_opened(file)) as db:
            return bool(_columns(db, _KERNELS) and _columns(db, "StringIds"))
    except (sqlite3.Error, UnicodeDecodeError):
        return False


def _opened(file: Path) -> sqlite3.Connection:
    """The report, never written, with text that is not UTF-8 replaced."""
    db = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    db.execute("PRAGMA trusted_schema=OFF")
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return db


def _columns(db: sqlite3.Connection, table: str) -> set[str]:
    is_table = db.execute(
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)
    ).fetchone()
    return {row[1] for row in db.execute(f"PRAGMA table_info({table})")} if is_table else set()


def _read(files: Sequence[Path], unread: Unread) -> Trace:
    profiles = [profile for report in each_readable(files, _report, unread) for profile in report]
    if not profiles:
        raise BadTrace(f"{files[0]} contains no kernels: profile with --trace=cuda,nvtx")
    return trace_of(profiles, f"Nsight Systems reports of {counted(len(profiles), 'rank')}")


def _report(file: Path) -> list[Profile]:
    """The ranks of one report. Raises BadTrace."""
    try:
        with closing(_opened(file)) as db:
            return _profiles(db, file)
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        reason = str(error).replace("\n", " ")[:120]
        raise BadTrace(
            f"{file} cannot be read as an Nsight Systems report ({reason}): export it again"
        ) from error


def _profiles(db: sqlite3.Connection, file: Path) -> list[Profile]:
    """The ranks of one report."""
    strings: dict[int, str] = dict(db.execute("SELECT id, value FROM StringIds"))
    kernels = _rows(db, _KERNELS, ("start", "end", "correlationId", "streamId", "deviceId", "globalPid"))
    has_name = _columns(db, _KERNELS)
    name = next((entry for entry in ("demangledName", "shortName", "mangledName") if entry in has_name), None)
    names = [row[0] for row in db.execute(f"SELECT {name} FROM {_KERNELS} ORDER BY rowid")] if name else []
    calls = _rows(db, _CALLS, ("start", "end", "correlationId", "globalTid", "nameId"))
    ops = {number: op_of_kernel(strings.get(number, "")) for number in set(names)}
    is_collective = np.array([ops[number] is not None for number in names], bool)
    if len(is_collective) != len(kernels):
        is_collective = np.zeros(len(kernels), bool)
    epoch_ns, host = _epoch_ns(db), _host(db)
    owners = kernels[:, 5][is_collective] if is_collective.any() else kernels[:, 5]
    processes = np.unique(owners).tolist()
    devices = {pid: int(kernels[kernels[:, 5] == pid][0, 4]) for pid in processes}
    ranks = _ranks(file, processes, devices)
    steps = _steps(db, strings)
    profiles = []
    for number, pid in enumerate(processes):
        own = is_collective & (kernels[:, 5] == pid)
        tids = calls[:, 3] >> 24 == pid >> 24 if pid > 0 else np.ones(len(calls), bool)
        profile = Profile(
            file, ranks[number], UNKNOWN, (pid >> 24) & _NOT_PID if pid > 0 else number + 1, host
        )
        _fill(
            profile,
            kernels[own],
            [ops[names[i]] for i in np.flatnonzero(own)],
            calls[tids],
            strings,
            epoch_ns,
        )
        own_rows = steps[(steps[:, 2] >> 24 == pid >> 24) | (steps[:, 2] < 0)] if pid > 0 else steps
        profile.steps = np.array([(begin + epoch_ns, step) for begin, step, _ in own_rows.tolist()], STEP)
        profiles.append(profile)
    return profiles


def _rows(db: sqlite3.Connection, table: str, wanted: Sequence[str]) -> Array:
    """int64 (n, columns) of a table, -1 where a column or a value is missing."""
    has = _columns(db, table)
    if not has:
        return np.empty((0, len(wanted)), np.int64)
    names = ", ".join(f'COALESCE("{name}", -1)' if name in has else "-1" for name in wanted)
    rows = db.execute(f"SELECT {names} FROM {table} ORDER BY rowid LIMIT {_MAX_ROWS}").fetchall()
    return np.array(rows, np.int64).reshape(-1, len(wanted))


def _fill(
    profile: Profile, kernels: Array, ops: Sequence[Any], calls: Array, strings: dict[int, str], epoch_ns: int
) -> None:
    """Kernels and calls of one rank, in ns since 1970."""
    own_ops = list(dict.fromkeys(ops))
    profile.collectives = [Collective(op) for op in own_ops]
    damaged = kernels[:, 1] < kernels[:, 0]
    if damaged.any():
        profile.omitted["kernels with a negative duration"] = int(damaged.sum())
    profile.kernels = np.empty(len(kernels), KERNEL)
    for i, name in enumerate(("begin_ns", "end_ns", "correlation", "stream")):
        profile.kernels[name] = kernels[:, i] + (epoch_ns if i < 2 else 0)
    profile.kernels["collective"] = [own_ops.index(op) for op in ops]
    profile.kernels = profile.kernels[~damaged]
    calls = calls[calls[:, 1] >= calls[:, 0]]
    numbers, symbol = np.unique(calls[:, 4], return_inverse=True)
    profile.names = [re.sub(r"_v\d+$", "", strings.get(number, ""))[:128] for number in numbers.tolist()]
    profile.calls = np.empty(len(calls), CALL)
    profile.calls["begin_ns"], profile.calls["duration_ns"] = (
        calls[:, 0] + epoch_ns,
        calls[:, 1] - calls[:, 0],
    )
    profile.calls["tid"] = np.where(calls[:, 3] >= 0, calls[:, 3] & _NOT_PID, 1)
    profile.calls["correlation"], profile.calls["symbol"] = calls[:, 2], symbol
    profile.calls["op"] = np.array([op_of(name) for name in profile.names] or [Op.NONE], np.uint16)[symbol]


def _epoch_ns(db: sqlite3.Connection) -> int:
    if "utcEpochNs" not in _columns(db, "TARGET_INFO_SESSION_START_TIME"):
        return 0
    row = db.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
    return int(row[0]) if row and row[0] is not None and 0 <= int(row[0]) < 2**61 else 0


def _host(db: sqlite3.Connection) -> str:
    if not {"name", "value"} <= _columns(db, "TARGET_INFO_SYSTEM_ENV"):
        return ""
    row = db.execute("SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname'").fetchone()
    return str(row[0])[:256] if row else ""


def _ranks(file: Path, processes: Sequence[int], devices: dict[int, int]) -> list[int]:
    """The rank of each process: the rank in the file's name if it is the only process, otherwise by device."""
    if len(processes) == 1:
        named = named_rank(file)
        numbers = ranks_in_name(file)
        return [named if named is not None else numbers[0] if numbers else UNKNOWN]
    order = sorted(processes, key=lambda pid: (devices[pid], pid))
    return [order.index(pid) for pid in processes]


def _steps(db: sqlite3.Connection, strings: dict[int, str]) -> Array:
    """Begin, number and thread of the NVTX ranges of steps: int64 (n, 3)."""
    has = _columns(db, "NVTX_EVENTS")
    if "start" not in has or not has & {"text", "textId"}:
        return np.empty((0, 3), np.int64)
    columns = ", ".join(name if name in has else "NULL" for name in ("start", "text", "textId", "globalTid"))
    steps = []
    for start, text, text_id, tid in db.execute(f"SELECT {columns} FROM NVTX_EVENTS LIMIT {_MAX_ROWS}"):
        step = _STEP.match(str(text if text is not None else strings.get(text_id, "")))
        if step and isinstance(start, int):
            steps.append((start, int(step[1]), tid if isinstance(tid, int) else -1))
    return np.array(steps, np.int64).reshape(-1, 3)


IMPORTER = Importer("Nsight Systems report (SQLite)", _accepts, _read)
