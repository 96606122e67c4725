"""Host events that affected the job in the last seconds, one line each: ends and stops first, then slow events."""

import signal
from collections.abc import Callable, Mapping

import numpy as np

from stallscope.diagnose.processes import STOPS, end, sender, signal_name
from stallscope.events.layout import Array
from stallscope.events.names import HostKind

MAX_LINES = 4
_SLOW_NS = 50_000_000

ProcessKey = tuple[int, int]


def lines(rows: Array, processes: Mapping[ProcessKey, tuple[int, str]]) -> list[str]:
    """rows: HOST_EVENTS of the window. processes: rank (-1 if unknown) and name by node and pid."""
    is_own = np.array([key in processes for key in rows[["node", "pid"]].tolist()], bool)
    job_rows, texts = rows[is_own], []
    for describe in (_ends, _stops, _throttled, _disks, _memory, _driver, _network):
        texts += describe(job_rows, lambda row: _title(processes, row))
    return texts[:MAX_LINES]


Titled = Callable[[Array], str]


def _title(processes: Mapping[ProcessKey, tuple[int, str]], row: Array) -> str:
    rank, command = processes[int(row["node"]), int(row["pid"])]
    return f"rank {rank}" if rank >= 0 else f"{command} {int(row['pid'])}"


def _ends(rows: Array, title: Titled) -> list[str]:
    texts = []
    for row in rows[rows["kind"] == HostKind.EXIT]:
        if by := end(rows, int(row["node"]), int(row["pid"])).ended_by:
            texts.append(f"{title(row)} was ended by {by}")
    return texts


def _stops(rows: Array, title: Titled) -> list[str]:
    stops = rows[(rows["kind"] == HostKind.SIGNAL) & np.isin(rows["value"], (*STOPS, signal.SIGCONT))]
    by = {f"{title(row)} got {signal_name(int(row['value']))} from {sender(row)}": row for row in stops}
    return list(by)[-2:]


def _throttled(rows: Array, title: Titled) -> list[str]:
    rows = rows[rows["kind"] == HostKind.THROTTLED]
    return [
        f"CPU quota of {_text(group)} used up {int(rows['value'][mask].max())} times ({_text(rows['detail'][mask][0])})"
        for group in np.unique(rows["file"])
        for mask in [rows["file"] == group]
    ]


def _disks(rows: Array, title: Titled) -> list[str]:
    waits = rows[np.isin(rows["kind"], (HostKind.FILE_WAIT, HostKind.MAJOR_FAULT))]
    slow = waits[waits["duration_ns"] >= _SLOW_NS]
    if not len(slow):
        return []
    worst = slow[np.argmax(slow["duration_ns"])]
    about = f" ({_text(worst['file'])})" if worst["file"] else ""
    return [f"{title(worst)} waited {worst['duration_ns'] / 1e6:,.0f} ms for {_text(worst['device'])}{about}"]


def _memory(rows: Array, title: Titled) -> list[str]:
    rows = rows[np.isin(rows["kind"], (HostKind.RECLAIM, HostKind.COMPACTION))]
    ns = int(np.maximum(rows["duration_ns"], 0).sum())
    return [f"{title(rows[-1])} spent {ns / 1e6:,.0f} ms reclaiming memory"] if ns >= _SLOW_NS else []


def _driver(rows: Array, title: Titled) -> list[str]:
    calls = rows[(rows["kind"] == HostKind.DRIVER_CALL) & (rows["duration_ns"] >= _SLOW_NS)]
    if not len(calls):
        return []
    worst = calls[np.argmax(calls["duration_ns"])]
    call = _text(worst["detail"]).removeprefix("ioctl:")
    return [f"{title(worst)} was in the GPU driver for {worst['duration_ns'] / 1e6:,.0f} ms ({call})"]


def _network(rows: Array, title: Titled) -> list[str]:
    rows = rows[rows["kind"] == HostKind.RETRANSMIT]
    if not len(rows):
        return []
    worst = rows[np.argmax(rows["value"])]
    return [f"{int(rows['value'].sum())} TCP retransmits, most of {title(worst)} to {_text(worst['file'])}"]


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
