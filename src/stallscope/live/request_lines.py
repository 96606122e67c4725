"""The requests to inference engines in the last minute, and the requests that are open now."""

from collections import deque
from dataclasses import dataclass, field, replace

from stallscope.diagnose.views import Endpoint, endpoints
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array, Table
from stallscope.events.trace import Trace

WINDOW_NS = 60 * 10**9
_FRESH_NS = 5 * 10**9
"""A process without a row for this time has no open requests."""


@dataclass(frozen=True)
class OpenLine:
    """The open requests of one process. oldest_s: age of the oldest, still_s: time since its last token or byte.

    awaits: the location of the oldest request. oldest_s, still_s: None if all clients do not take data.
    """

    pid: int
    engine: str
    model: str
    n_open: int
    n_full: int
    oldest_path: str
    oldest_s: float | None
    still_s: float | None
    awaits: str


@dataclass
class RequestState:
    """The rows of the last minute, by arrival of batches."""

    now_ns: int = 0
    _rows: dict[str, deque[Array]] = field(default_factory=dict)

    def feed(self, batch: Trace) -> None:
        """Add new rows, and drop rows that are too old."""
        for table in layout.SERVING_TABLES:
            rows = getattr(batch, table.name)
            if len(rows):
                newest = rows["end_ns"] if table is layout.REQUESTS else rows["ts_ns"]
                self.now_ns = max(self.now_ns, int(newest.max()))
                self._rows.setdefault(table.name, deque()).append(rows)
        states = batch.snapshots["ts_ns"]
        self.now_ns = max(self.now_ns, int(states.max(initial=0)))
        for kept in self._rows.values():
            while kept and int(kept[0]["ts_ns"].max()) < self.now_ns - WINDOW_NS:
                kept.popleft()

    def endpoints(self) -> list[Endpoint]:
        """The endpoints of the last minute, the endpoint with most requests first; rates are of the whole minute."""
        requests, tokens = self._joined(layout.REQUESTS), self._joined(layout.TOKENS)
        lines = endpoints(replace(Trace(), requests=requests, tokens=tokens))
        return [replace(each, per_second=round(each.n / (WINDOW_NS / 1e9), 3)) for each in lines]

    def open_requests(self) -> list[OpenLine]:
        """The processes with open requests, the oldest request first."""
        rows = self._joined(layout.SERVERS)
        rows = rows[rows["ts_ns"] > self.now_ns - _FRESH_NS]
        newest = {(int(row["node"]), int(row["pid"])): row for row in rows}
        lines = [_open_line(row) for row in newest.values() if row["n_open"] > 0]
        return sorted(lines, key=lambda line: -(line.oldest_s or 0.0))

    def _joined(self, table: Table) -> Array:
        return layout.joined([layout.empty(table), *self._rows.get(table.name, ())])


def _open_line(row: Array) -> OpenLine:
    def text(name: str) -> str:
        return bytes(row[name]).decode("utf-8", "replace")

    has_oldest = row["oldest_ns"] != UNKNOWN
    is_first = row["oldest_progress_ns"] == row["oldest_ns"]
    return OpenLine(
        pid=int(row["pid"]),
        engine=text("engine"),
        model=text("model"),
        n_open=int(row["n_open"]),
        n_full=int(row["n_full"]),
        oldest_path=text("oldest_path"),
        oldest_s=round(int(row["ts_ns"] - row["oldest_ns"]) / 1e9, 1) if has_oldest else None,
        still_s=round(int(row["ts_ns"] - row["oldest_progress_ns"]) / 1e9, 1) if has_oldest else None,
        awaits="waits for its client"
        if not has_oldest
        else f"waits for its {'first' if is_first else 'next'} token",
    )
