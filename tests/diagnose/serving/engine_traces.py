"""Traces of an inference engine, row by row: requests at regular times, and the activity of its threads."""

from dataclasses import dataclass, field, replace

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, OffCpuFlag, SampleRole
from stallscope.events.trace import Clock, Trace

MS = 10**6
SECOND = 10**9
PID, THREAD = 100, 100
FIRST_NS, GAP_NS, N_TOKENS = 20 * MS, 10 * MS, 10


@dataclass
class EngineTrace:
    """n requests, 100 ms apart, each with its first token after 20 ms and a token every 10 ms."""

    n: int = 50
    requests: Array = field(init=False)
    offcpu: list[Array] = field(default_factory=list)
    samples: list[Array] = field(default_factory=list)
    servers: list[Array] = field(default_factory=list)
    positions: list[Array] = field(default_factory=list)
    snapshots: list[Array] = field(default_factory=list)
    stacks: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.requests = layout.empty(layout.REQUESTS, self.n)
        rows, times = self.requests, SECOND + 100 * MS * np.arange(self.n)
        rows["ts_ns"] = rows["read_ns"] = rows["complete_ns"] = times
        rows["pid"], rows["tid"], rows["writer_tid"], rows["engine"] = PID, THREAD, THREAD, b"vllm"
        rows["path"], rows["status"], rows["flags"], rows["n_tokens"] = b"/v1/completions", 200, 1, N_TOKENS
        rows["first_ns"], rows["gap_ns"], rows["gap_at_ns"] = times + FIRST_NS, GAP_NS, times + FIRST_NS
        rows["last_ns"] = rows["end_ns"] = rows["first_ns"] + GAP_NS * (N_TOKENS - 1)
        rows["request_bytes"] = 500
        self.server(SECOND)

    def late_gap(self, i: int, ns: int) -> tuple[int, int]:
        """Delay the second token of a request. Returns begin and end of the gap."""
        row = self.requests[i : i + 1]
        row["gap_ns"] = ns
        row["last_ns"] += ns - GAP_NS
        row["end_ns"] = row["last_ns"]
        return int(row["gap_at_ns"][0]), int(row["gap_at_ns"][0]) + ns

    def late_first(self, i: int, ns: int) -> tuple[int, int]:
        """Delay the first token. Returns begin and end of the time until it."""
        row = self.requests[i : i + 1]
        for name in ("first_ns", "gap_at_ns", "last_ns", "end_ns"):
            row[name] += ns - FIRST_NS
        return int(row["read_ns"][0]), int(row["read_ns"][0]) + ns

    def off(self, begin_ns: int, end_ns: int, category: Category, **values: object) -> None:
        """An interval off the CPU of the serving thread."""
        row = layout.empty(layout.OFFCPU, 1)
        row["ts_ns"], row["duration_ns"], row["pid"], row["tid"] = begin_ns, end_ns - begin_ns, PID, THREAD
        row["category"] = category
        for name, value in values.items():
            row[name] = value
        self.offcpu.append(row)

    def runs_between(self, begin_ns: int, end_ns: int, category: Category, **values: object) -> None:
        """A thread that is off the CPU for half a second before and after a delay, but not during it."""
        for before_ns, after_ns in ((begin_ns - SECOND // 2, begin_ns), (end_ns, end_ns + SECOND // 2)):
            self.off(before_ns, after_ns, category, **values)

    def serves(self) -> None:
        """Samples of the loop that waits for requests, in ten seconds."""
        for second in range(5, 15):
            self.sample(second * SECOND, Category.NET, "/srv/app.py:9 serve", role=SampleRole.SAME_PROCESS)

    def sample(self, at_ns: int, category: Category, frame: str = "", **values: object) -> None:
        """Ten samples in the second of a moment."""
        row = layout.empty(layout.SAMPLES, 1)
        row["ts_ns"], row["pid"], row["owner_pid"], row["tid"] = at_ns + SECOND // 2, PID, PID, THREAD
        row["category"], row["n"], row["role"] = category, 10, SampleRole.GPU
        row["stack"] = self.stack(frame) if frame else UNKNOWN
        for name, value in values.items():
            row[name] = value
        self.samples.append(row)

    def stack(self, *frames: str) -> int:
        self.stacks[len(self.stacks) + 1] = frames
        return len(self.stacks)

    def server(self, ts_ns: int, **values: object) -> None:
        row = layout.empty(layout.SERVERS, 1)
        row["ts_ns"], row["pid"], row["group_pid"], row["engine"] = ts_ns, PID, PID, b"vllm"
        row["n_open"] = 0
        for name, value in values.items():
            row[name] = value
        self.servers.append(row)

    def state(self, ts_ns: int, category: Category, spent_ns: int, *, pid: int = PID) -> None:
        row = layout.empty(layout.SNAPSHOTS, 1)
        row["ts_ns"], row["pid"], row["alive"], row["category"] = ts_ns, pid, 1, category
        row["ledger_ns"][0][category - 1] = spent_ns
        self.snapshots.append(row)

    def position(self, ts_ns: int, *frames: str, pid: int = PID, tid: int = THREAD) -> None:
        row = layout.empty(layout.POSITIONS, 1)
        row["ts_ns"], row["pid"], row["tid"], row["stack"] = ts_ns, pid, tid, self.stack(*frames)
        self.positions.append(row)

    def trace(self) -> Trace:
        def joined(rows: list[Array], table: layout.Table) -> Array:
            return np.concatenate([*rows, layout.empty(table)])

        return replace(
            Trace(),
            requests=self.requests,
            offcpu=joined(self.offcpu, layout.OFFCPU),
            samples=joined(self.samples, layout.SAMPLES),
            servers=joined(self.servers, layout.SERVERS),
            positions=joined(self.positions, layout.POSITIONS),
            snapshots=joined(self.snapshots, layout.SNAPSHOTS),
            tokens=self._tokens(),
            stacks=self.stacks,
            nodes=("here",),
            clocks=(Clock(0, 0, 0),),
            ends_ns=(int(self.requests["end_ns"].max(initial=SECOND)),),
        )

    def _tokens(self) -> Array:
        rows = layout.empty(layout.TOKENS, 1)
        rows["ts_ns"], rows["pid"], rows["path"] = SECOND, PID, b"/v1/completions"
        rows["n"] = self.n * (N_TOKENS - 1)
        rows["histogram"] = b'{"%d": %d}' % (GAP_NS // 1000, self.n * (N_TOKENS - 1))
        return rows


LATE = (5, 15, 25, 35)
THROTTLED = OffCpuFlag.PREEMPTED | OffCpuFlag.THROTTLED
