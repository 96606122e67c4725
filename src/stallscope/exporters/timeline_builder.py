"""Builds the timeline of a trace: a track for each node, in it each process with its threads, communicators and waits.

The same trace and report give the same timeline.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CATEGORY_NAMES, Category, Datatype, OffCpuFlag, Op, word
from stallscope.events.trace import Trace
from stallscope.exporters import gpu_track, host_track
from stallscope.exporters.arrows import Arrows, arrows, waits
from stallscope.exporters.trace_context import Process, Scene, scene
from stallscope.exporters.track_layout import laned
from stallscope.exporters.tracks import Slice, Story, Track, Value

_SHARES = (Category.ON_CPU, Category.WAIT_GPU, Category.IO, Category.PREEMPTED)
"""The ledger categories that get a counter; the other categories appear in the slices."""


@dataclass
class _Drawn:
    """The tracks so far."""

    tracks: list[Track] = field(default_factory=list)

    def add(self, parent: int, name: str, process: str, **content: object) -> int:
        """Add a track and return its number."""
        number = len(self.tracks) + 1
        self.tracks.append(replace(Track(number, parent, name, process), **content))  # type: ignore[arg-type]
        return number

    def add_laned(self, parent: int, name: str, process: str, slices: Iterable[Slice]) -> None:
        """Add slices that may overlap, on the number of tracks that they need."""
        for i, lane in enumerate(laned(list(slices))):
            self.add(parent, name if not i else f"{name} ({i + 1})", process, slices=lane)


def story(trace: Trace, report: Report) -> Story:
    """All tracks of a trace. report: the diagnosis of the trace."""
    seen = scene(trace)
    drawn = _Drawn()
    drawn.add_laned(0, "verdicts", "verdicts", [_verdict(seen, verdict) for verdict in report.verdicts])
    pointing = arrows(seen, report.verdicts)
    for node, name in enumerate(trace.nodes):
        own = [process for process in seen.processes if process.node == node]
        gpus = list(gpu_track.counters(seen, node))
        if not own and not gpus:
            continue
        place = name or f"node {node}"
        parent = drawn.add(0, place, place)
        for title, slices in _labels(seen, node, 0):
            drawn.add_laned(parent, title, place, slices)
        for title, unit, samples in gpus:
            drawn.add(parent, title, place, samples=samples, unit=unit)
        for process in own:
            _draw_process(drawn, seen, pointing, parent=parent, process=process)
    readings = [clock for clock in trace.clocks if clock.node == seen.first_node]
    if not readings:
        return Story(drawn.tracks, seen.begin_ns)
    return Story(drawn.tracks, readings[0].monotonic_ns, readings[0].wall_ns)


def _draw_process(drawn: _Drawn, seen: Scene, pointing: Arrows, *, parent: int, process: Process) -> None:
    place = seen.trace.nodes[process.node]
    name = f"rank {process.rank}" if process.rank != UNKNOWN else "process"
    name = f"{name}: {process.comm or 'pid'} {process.pid}"
    whole = f"{place} {name}".strip()
    own = drawn.add(parent, name, whole)
    if process.row != UNKNOWN:
        for title, slices in _collectives(seen, pointing, process.row):
            drawn.add_laned(own, title, whole, slices)
        drawn.add_laned(own, "waits", whole, _waits(seen, pointing, process.row))
        drawn.add_laned(own, "GPU", whole, _on_gpu(seen, process.row))
    for title, slices in _labels(seen, process.node, process.pid):
        drawn.add_laned(own, title, whole, slices)
    drawn.add_laned(own, "work", whole, _spans(seen, process))
    drawn.add_laned(own, "machine", whole, host_track.slices(*_of(seen, seen.trace.host_events, process)))
    for tid, calls, away in _threads(seen, process):
        thread = f"thread {tid}"
        drawn.add_laned(own, thread, whole, calls)
        drawn.add_laned(own, f"{thread} off CPU", whole, away)
    for title, unit, samples in _counters(seen, process):
        drawn.add(own, title, whole, samples=samples, unit=unit)


def _verdict(seen: Scene, verdict: Verdict) -> Slice:
    begin = seen.begin_ns if verdict.since_ns is None else seen.from_wall_ns(verdict.since_ns)
    end = seen.end_ns if verdict.until_ns is None else seen.from_wall_ns(verdict.until_ns)
    told: dict[str, Value] = {
        "summary": verdict.summary,
        "kind": verdict.kind,
        "ranks": ", ".join(map(str, verdict.ranks)),
        "confidence": verdict.confidence,
    }
    if verdict.causes:
        told["cause"] = ", ".join(f"{part.cause.name} {part.share:.0%}" for part in verdict.causes)
    if verdict.cost:
        told["gpu_seconds"] = verdict.cost.gpu_seconds
        if verdict.cost.at_most_gpu_seconds is not None:
            told["at_most_gpu_seconds"] = verdict.cost.at_most_gpu_seconds
    who = f" rank {', '.join(map(str, verdict.ranks[:4]))}" if verdict.ranks else ""
    return Slice(begin, max(end - begin, 0), f"{verdict.kind}{who}", told)


def _collectives(seen: Scene, pointing: Arrows, process: int) -> Iterator[tuple[str, list[Slice]]]:
    """By communicator: from each arrival to the last rank's arrival, or to the next collective of the process."""
    line, met = seen.line, seen.met
    mine = np.flatnonzero(line.process == process)
    for comm in np.unique(line.comm[mine]).tolist():
        rows = mine[line.comm[mine] == comm]
        begin = seen.clocks.arrival_ns[rows]
        following = np.append(begin[1:], seen.end_ns)
        missing = met.n_arrived[met.round[rows]] < met.n_arrived[met.round[rows]].max()
        until = np.where(missing & (rows == rows[-1]), seen.end_ns, met.last_ns[met.round[rows]])
        end = np.maximum(np.minimum(until, np.maximum(following, begin)), begin)
        first = line.rows[rows[0]]
        peer = f" with {int(first['peer_rank'])}" if line.is_p2p[rows[0]] else ""
        title = f"communicator {int(first['comm_hash']):016x} ({int(first['nranks'])} ranks){peer}"
        yield (
            title,
            [
                _arrival(seen, pointing, row, begin_ns=b, end_ns=e)
                for row, b, e in zip(rows.tolist(), begin.tolist(), end.tolist(), strict=True)
            ],
        )


def _arrival(seen: Scene, pointing: Arrows, row: int, *, begin_ns: int, end_ns: int) -> Slice:
    one, late_ns = seen.line.rows[row], seen.met.late_ns[row]
    told: dict[str, Value] = {"round": int(one["seq"])}
    if one["count_bytes"] != UNKNOWN:
        told["bytes"] = int(one["count_bytes"])
    if one["datatype"]:
        told["datatype"] = word(Datatype, int(one["datatype"]))
    if not np.isnan(late_ns):
        told["late_ms"] = round(float(late_ns) / 1e6, 3)
    name = word(Op, int(one["op"]))
    return Slice(begin_ns, end_ns - begin_ns, name, told, starts=pointing.from_row.get(row, ()))


def _waits(seen: Scene, pointing: Arrows, process: int) -> Iterator[Slice]:
    """The waits, and a moment of release for each arrow that ends at a wait."""
    found = waits(seen, process)
    for i, (enter, leave) in enumerate(zip(found.enter_ns.tolist(), found.leave_ns.tolist(), strict=True)):
        yield Slice(enter, leave - enter, "wait")
        if ends := pointing.to_wait.get((process, i)):
            yield Slice(leave, 0, "released", ends=ends)


def _on_gpu(seen: Scene, process: int) -> Iterator[Slice]:
    rows = seen.line.rows[seen.line.process == process]
    rows = rows[(rows["gpu_start_ns"] > 0) & (rows["gpu_end_ns"] >= rows["gpu_start_ns"])]
    begin = seen.common_ns(int(seen.line.node[process]), rows["gpu_start_ns"])
    length = rows["gpu_end_ns"] - rows["gpu_start_ns"]
    for row, at, took in zip(rows, begin.tolist(), length.tolist(), strict=True):
        yield Slice(at, took, word(Op, int(row["op"])), {"round": int(row["seq"])})


def _labels(seen: Scene, node: int, pid: int) -> Iterator[tuple[str, list[Slice]]]:
    """The job's annotations by label. Each lasts until the next of its label; an empty value only ends the last."""
    rows = seen.trace.annotations
    rows = rows[(rows["node"] == node) & (rows["pid"] == pid)]
    for label in sorted(set(rows["label"].tolist())):
        own = np.sort(rows[rows["label"] == label], order="ts_ns", kind="stable")
        begin = seen.common_ns(node, own["ts_ns"]).tolist()
        name = label.decode("utf-8", "replace")
        values = [value.decode("utf-8", "replace") for value in own["value"].tolist()]
        until = zip(values, begin, [*begin[1:], max(seen.end_ns, *begin)], strict=True)
        yield name, [Slice(at, end - at, f"{name} {value}") for value, at, end in until if value]


def _spans(seen: Scene, process: Process) -> Iterator[Slice]:
    rows, begin = _of(seen, seen.trace.spans, process)
    for row, at in zip(rows, begin, strict=True):
        label = row["label"].decode("utf-8", "replace") or word(Op, int(row["op"]))
        told: dict[str, Value] = {} if row["step"] == UNKNOWN else {"step": int(row["step"])}
        yield Slice(at, max(int(row["duration_ns"]), 0), label, told)


def _threads(seen: Scene, process: Process) -> Iterator[tuple[int, list[Slice], list[Slice]]]:
    """By thread: its calls, and when it was off the CPU."""
    calls, call_at = _of(seen, seen.trace.calls, process)
    away, away_at = _of(seen, seen.trace.offcpu, process)
    for tid in sorted({*calls["tid"].tolist(), *away["tid"].tolist()}):
        yield (
            tid,
            [_call(seen, calls[i], call_at[i]) for i in np.flatnonzero(calls["tid"] == tid).tolist()],
            [_off_cpu(seen, away[i], away_at[i]) for i in np.flatnonzero(away["tid"] == tid).tolist()],
        )


def _call(seen: Scene, row: Any, at_ns: int) -> Slice:
    symbol = int(row["symbol"])
    name = seen.trace.symbols[symbol] if symbol < len(seen.trace.symbols) else ""
    told: dict[str, Value] = {}
    if row["count_bytes"] != UNKNOWN:
        told["bytes"] = int(row["count_bytes"])
    return _lasting(seen, row, at_ns, name=name or word(Op, int(row["op"])), told=told)


def _off_cpu(seen: Scene, row: Any, at_ns: int) -> Slice:
    told: dict[str, Value] = {}
    if row["by_pid"] != UNKNOWN:
        told["cpu_went_to"] = f"{row['by_comm'].decode('utf-8', 'replace')} {int(row['by_pid'])}"
    if row["syscall_nr"] != UNKNOWN:
        told["syscall_nr"] = int(row["syscall_nr"])
    if row["waker_pid"] != UNKNOWN:
        told["woken_by"] = f"{int(row['waker_pid'])}/{int(row['waker_tid'])}"
    if row["flags"] & OffCpuFlag.PREEMPTED:
        told["was_runnable"] = True
    return _lasting(seen, row, at_ns, name=word(Category, int(row["category"])), told=told)


def _lasting(seen: Scene, row: Any, at_ns: int, *, name: str, told: dict[str, Value]) -> Slice:
    """A slice of a record whose end may be unknown. It then lasts to the end of the trace and is marked as open."""
    took = int(row["duration_ns"])
    if took == UNKNOWN:
        return Slice(at_ns, max(seen.end_ns - at_ns, 0), name, told | {"is_open": True})
    return Slice(at_ns, took, name, told)


def _counters(seen: Scene, process: Process) -> Iterator[tuple[str, str, Sequence[tuple[int, float]]]]:
    """Counters from the snapshots: collectives so far, and the share of time in some categories of the time ledger."""
    rows, at = _of(seen, seen.trace.snapshots, process)
    if len(rows) < 2:
        return
    known = [(t, float(n)) for t, n in zip(at, rows["n_collectives"].tolist(), strict=True) if n != UNKNOWN]
    yield "collectives", "", known
    passed = np.maximum(np.diff(np.array(at)), 1)
    for category in _SHARES:
        share = np.clip(np.diff(rows["ledger_ns"][:, category - 1]) / passed * 100, 0, 100)
        if share.any():
            yield (
                CATEGORY_NAMES[category - 1],
                "%",
                [(t, round(float(value), 1)) for t, value in zip(at[1:], share, strict=True)],
            )


def _of(seen: Scene, table: Array, process: Process) -> tuple[Array, list[int]]:
    """The rows of a process in a table, by time, and their times on the common clock."""
    rows = table[(table["node"] == process.node) & (table["pid"] == process.pid)]
    at = seen.common_ns(process.node, rows["ts_ns"])
    order = np.argsort(at, kind="stable")
    return rows[order], at[order].tolist()
