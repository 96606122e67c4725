"""A part of a trace: the last seconds, an interval of wall time, or the steps or phase annotated by the job.

A part is a set of windows on each node's clock. On a narrowed connection, the tables of events contain only the rows
inside them; the tables of processes and communicators stay whole.
"""

import sqlite3
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files

from stallscope.errors import NotFound
from stallscope.events.layout import NODE_TABLES, OWNERS, TABLES

Window = tuple[int, int]
Windows = Mapping[int, Sequence[Window]]
"""By node: begin and end (exclusive) in ns on its clock, sorted, without overlap."""

_ALWAYS = (-(1 << 62), 1 << 62)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The limits of a part; None: no limit. All limits apply together.

    since_ns: the last since_ns before each node's newest event. from_wall_ns, to_wall_ns: wall time. steps: the
    first and last step, as annotated by the job. phase: the annotated phase. last_rounds: number of
    last rounds of the communicator with the most rounds.
    """

    since_ns: int | None = None
    from_wall_ns: int | None = None
    to_wall_ns: int | None = None
    steps: tuple[int, int] | None = None
    phase: str | None = None
    last_rounds: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all limits are None."""
        return self == Part()


def windows(db: sqlite3.Connection, part: Part) -> dict[int, list[Window]]:
    """The windows of a part, for every node of the trace.

    Raises NotFound for steps or a phase without annotations, and for a start after the end of the trace.
    """
    nodes = [node for (node,) in db.execute("SELECT node FROM nodes")]
    windows_by_node: dict[int, list[Window]] = {node: [_ALWAYS] for node in nodes}
    latest: dict[int, int] = {}
    if part.since_ns is not None or part.from_wall_ns is not None:
        latest = dict(db.execute(files("stallscope.store").joinpath("sql", "latest.sql").read_text()))
    if part.since_ns is not None:
        windows_by_node = {node: [(latest.get(node, 0) - part.since_ns, _ALWAYS[1])] for node in nodes}
    if part.last_rounds is not None:
        windows_by_node = _intersect(windows_by_node, _last_rounds(db, nodes, part.last_rounds))
    clocks = {node: _WallTime(db, node) for node in nodes}
    last_ns = [wall_ns for node, ns in latest.items() if (wall_ns := clocks[node].wall_ns(ns)) is not None]
    if part.from_wall_ns is not None and last_ns and max(last_ns) < part.from_wall_ns:
        end = datetime.fromtimestamp(max(last_ns) // 10**9, UTC)
        raise NotFound(
            f"the trace ends at {end:%Y-%m-%dT%H:%M:%S} UTC, before the selected part; select an earlier time"
        )
    if part.from_wall_ns is not None or part.to_wall_ns is not None:
        windows_by_node = _intersect(
            windows_by_node,
            {node: [clocks[node].window(part.from_wall_ns, part.to_wall_ns)] for node in nodes},
        )
    if part.steps is not None:
        low, high = part.steps
        marked = _annotated_windows(
            db, "step", clocks, lambda value: value.isdecimal() and low <= int(value) <= high
        )
        windows_by_node = _intersect(
            windows_by_node,
            _require(marked, f"no step {low} to {high}: the job annotated none of these steps"),
        )
    if part.phase is not None:
        marked = _annotated_windows(db, "phase", clocks, lambda value: value == part.phase)
        windows_by_node = _intersect(
            windows_by_node, _require(marked, f"no phase {part.phase!r}: {_phases(db)}")
        )
    return windows_by_node


def narrow(db: sqlite3.Connection, windows_by_node: Windows) -> None:
    """Limit the tables of events to the windows, on this connection only. The file is not changed."""
    db.execute("CREATE TEMP TABLE part_windows (node INTEGER, begin_ns INTEGER, end_ns INTEGER)")
    rows = [(node, *window) for node, node_windows in windows_by_node.items() for window in node_windows]
    db.executemany("INSERT INTO part_windows VALUES (?, ?, ?)", rows)
    db.commit()
    existing = {name for (name,) in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")}
    for name in (name for name in _NARROWED if name in existing):
        db.execute(
            f"CREATE TEMP VIEW {name} AS SELECT * FROM main.{name} WHERE EXISTS (SELECT 1 FROM temp.part_windows AS w "
            f"WHERE w.node = {name}.node AND {name}.ts_ns >= w.begin_ns AND {name}.ts_ns < w.end_ns)"
        )


_NARROWED = (
    *(table.name for table in TABLES if not any(field.name == "ended_ns" for field in table.fields)),
    *(table.name for table in NODE_TABLES if table is not OWNERS),
    "annotations",
)


class _WallTime:
    """Wall time on a node's clock, by its nearest reading."""

    def __init__(self, db: sqlite3.Connection, node: int):
        statement = "SELECT wall_ns, monotonic_ns FROM clocks WHERE node = ? ORDER BY wall_ns"
        self._readings = db.execute(statement, (node,)).fetchall()

    def window(self, begin_ns: int | None, end_ns: int | None) -> Window:
        """An interval of wall time; unlimited without a clock reading."""
        return (
            _ALWAYS[0] if begin_ns is None else self.at(begin_ns, _ALWAYS[0]),
            _ALWAYS[1] if end_ns is None else self.at(end_ns, _ALWAYS[1]),
        )

    def at(self, wall_ns: int, otherwise: int) -> int:
        """A moment of wall time."""
        if not self._readings:
            return otherwise
        after = bisect_right(self._readings, (wall_ns, 1 << 62))
        near = self._readings[max(after - 1, 0)]
        return int(wall_ns - near[0] + near[1])

    def wall_ns(self, at_ns: int) -> int | None:
        """The wall time of a moment of the node's clock."""
        if not self._readings:
            return None
        near = min(self._readings, key=lambda reading: abs(reading[1] - at_ns))
        return int(at_ns - near[1] + near[0])


def _annotated_windows(
    db: sqlite3.Connection, label: str, clocks: Mapping[int, _WallTime], is_accepted: Callable[[str], bool]
) -> dict[int, list[Window]]:
    """The windows from each accepted label to the next label of its kind from the same process.

    A node whose processes annotated nothing gets the windows of another node, by wall time.
    """
    rows = db.execute(
        "SELECT node, pid, ts_ns, value FROM annotations WHERE label = ? ORDER BY node, pid, ts_ns, id",
        (label,),
    ).fetchall()
    windows_by_node: dict[int, list[Window]] = {}
    for i, (node, pid, ts_ns, value) in enumerate(rows):
        next_row = rows[i + 1] if i + 1 < len(rows) else None
        end_ns = next_row[2] if next_row and next_row[:2] == (node, pid) else _ALWAYS[1]
        if value is not None and is_accepted(value):
            windows_by_node.setdefault(node, []).append((ts_ns, end_ns))
    merged = {node: _merge(node_windows) for node, node_windows in windows_by_node.items()}
    if not merged:
        return {}
    reference = next(iter(merged))
    return {
        node: merged.get(node) or _translate(merged[reference], clocks[reference], clock)
        for node, clock in clocks.items()
    }


def _translate(windows: list[Window], source: _WallTime, target: _WallTime) -> list[Window]:
    def moved(at_ns: int) -> int:
        wall = source.wall_ns(at_ns) if abs(at_ns) < _ALWAYS[1] else None
        return at_ns if wall is None else target.at(wall, at_ns)

    return [(moved(begin), moved(end)) for begin, end in windows]


def _last_rounds(db: sqlite3.Connection, nodes: list[int], n: int) -> dict[int, list[Window]]:
    largest = db.execute(
        "SELECT comm_hash, MAX(seq) FROM collectives WHERE seq IS NOT NULL GROUP BY comm_hash "
        "ORDER BY COUNT(DISTINCT seq) DESC LIMIT 1"
    ).fetchone()
    if not largest:
        return {node: [_ALWAYS] for node in nodes}
    first = dict(
        db.execute(
            "SELECT node, MIN(ts_ns) FROM collectives WHERE comm_hash = ? AND seq > ? GROUP BY node",
            (largest[0], largest[1] - n),
        )
    )
    return {node: [(first.get(node, _ALWAYS[0]), _ALWAYS[1])] for node in nodes}


def _require(annotated: dict[int, list[Window]], reason: str) -> dict[int, list[Window]]:
    if not annotated:
        raise NotFound(f"{reason} (annotate with `stallscope annotate`, or stallscope.annotate in Python)")
    return annotated


def _phases(db: sqlite3.Connection) -> str:
    phases = [
        phase
        for (phase,) in db.execute("SELECT DISTINCT value FROM annotations WHERE label = 'phase' LIMIT 9")
    ]
    return f"the job annotated {', '.join(map(str, phases))}" if phases else "the job annotated no phases"


def _intersect(a: Mapping[int, list[Window]], b: Mapping[int, list[Window]]) -> dict[int, list[Window]]:
    """The intersections, by node."""
    intersections: dict[int, list[Window]] = {}
    for node, windows in a.items():
        pairs = [
            (max(window[0], other[0]), min(window[1], other[1]))
            for window in windows
            for other in b.get(node, [])
        ]
        intersections[node] = _merge([pair for pair in pairs if pair[0] < pair[1]])
    return intersections


def _merge(windows: Sequence[Window]) -> list[Window]:
    """The windows in order, with adjacent and overlapping windows merged."""
    merged: list[Window] = []
    for begin, end in sorted(windows):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
