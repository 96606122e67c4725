"""The columns of a recording's events.parquet, checked."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events.layout import Array
from stallscope.importers.parquet import table

_COLUMNS = (
    *("ts_ns", "pid", "tid", "cpu", "kind", "symbol"),
    *("a0", "a1", "a2", "a3", "a4", "a5", "a6", "preempt", "comm"),
)
_TEXT_COLUMNS = ("kind", "symbol", "comm", "event")
LONG_NS = 1_000_000  # longer calls and off-CPU intervals get individual records
OPEN_NS = np.int64(1) << np.int64(62)
_LARGEST_ID = (1 << 32) - 1  # of a process or thread


@dataclass(frozen=True)
class Raw:
    """The columns of events.parquet; `arguments` is uint64 (7, n)."""

    ts_ns: Array
    pid: Array
    tid: Array
    kind: Array
    symbol: Array
    arguments: Array
    preempt: Array
    comm: Array
    has_syscalls: bool

    def where(self, mask: Array) -> "Raw":
        """The events that a mask selects."""
        return Raw(
            ts_ns=self.ts_ns[mask],
            pid=self.pid[mask],
            tid=self.tid[mask],
            kind=self.kind[mask],
            symbol=self.symbol[mask],
            arguments=self.arguments[:, mask],
            preempt=self.preempt[mask],
            comm=self.comm[mask],
            has_syscalls=self.has_syscalls,
        )


def raw_events(path: Path) -> Raw:
    """All events of a recording in order of time. Raises BadTrace."""
    columns = checked_table(path, _COLUMNS)
    if not len(columns["ts_ns"]):
        raise BadTrace(f"{path} contains no events")
    order = np.argsort(columns["ts_ns"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    arguments = np.stack([columns[f"a{i}"].astype(np.uint64) for i in range(7)])
    is_switch = columns["kind"] == "sched_switch"
    return Raw(
        ts_ns=columns["ts_ns"].astype(np.int64),
        pid=columns["pid"].astype(np.int64),
        tid=columns["tid"].astype(np.int64),
        kind=columns["kind"],
        symbol=columns["symbol"],
        arguments=arguments,
        preempt=columns["preempt"].astype(bool),
        comm=columns["comm"],
        has_syscalls=bool((arguments[5][is_switch] != 0).any()),
    )


def checked_table(path: Path, wanted: tuple[str, ...]) -> dict[str, Array]:
    """The wanted columns of a Parquet file: numbers unchanged, text as str. Raises BadTrace."""
    columns = table(path, wanted)
    wrong = [name for name in wanted if columns[name].dtype.kind not in ("OU" if _is_text(name) else "iub")]
    try:
        texts = {name: columns[name].astype(str) for name in wanted if _is_text(name) and name not in wrong}
    except ValueError:  # lists, or bytes that are not text
        wrong = [name for name in wanted if _is_text(name)]
    for name in ("pid", "tid"):
        values = columns.get(name, np.zeros(1, np.int64))
        if name not in wrong and len(values) and (values.min() < 0 or values.max() > _LARGEST_ID):
            wrong.append(name)
    if wrong:
        raise BadTrace(
            f"{path}: column {', '.join(wrong)} contains values of an unexpected type: record it again"
        )
    return columns | texts


def _is_text(name: str) -> bool:
    return name in _TEXT_COLUMNS
