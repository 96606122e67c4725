"""Builds the timeline of a trace: a track for each node, in it each process with its threads, communicators and waits.

The same trace and report give the same timeline.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stallscope.diagnose import Report, Verdict
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CATEGORY_NAMES, Category, Datatype, OffCpuFlag, Op, word
from stallscope.events.trace import Trace
from stallscope.exporters import gpu_track, host_track
from stallscope.exporters.arrows import Arrows, arrows, waits
from stallscope.exporters.trace_context import Process, TraceContext, trace_context
from stallscope.exporters.track_layout import track_rows
from stallscope.exporters.tracks import Slice, Track, TrackSet, Value

_SHARES = (Category.ON_CPU, Category.WAIT_GPU, Category.IO, Category.PREEMPTED)
"""The ledger categories that get a counter; the other categories appear in the slices."""


@dataclass
class _Builder:
    """The tracks so far."""

    tracks: list[Track] = field(default_factory=list)

    def add(self, parent: int, name: str, process: str, **content: object) -> int:
        """Add a track and return its number."""
        number = len(self.tracks) + 1
        self.tracks.append(replace(Track(number, parent, name, process), **content))  # type: ignore[arg-type]
        return number

    def add_slices(self, parent: int, name: str, process: str, slices: Iterable[Slice]) -> None:
        """Add slices that may overlap, on the number of tracks that they need."""
        for i, row_slices in enumerate(track_rows(list(slices))):
            self.add(parent, name if not i else f"{name} ({i + 1})", process, slices=row_slices)


def build_track_set(trace: Trace, report: Report) -> TrackSet:
    """All tracks of a trace. report: the diagnosis of the trace."""
    context = trace_context(trace)
    builder = _Builder()
    builder.add_slices(0, "verdicts", "verdicts", _verdicts(context, report))
    pointing = arrows(context, report.verdicts)
    for node, name in enumerate(trace.nodes):
        node_processes = [process for process in context.processes if process.node == node]
        gpus = list(gpu_track.counters(context, node))
        if not node_processes and not gpus:
            continue
        node_name = name or f"node {node}"
        parent = builder.add(0, node_name, node_name)
        for title, slices in _labels(context, node, 0):
            builder.add_slices(parent, title, node_name, slices)
        for title, unit, samples in gpus:
            builder.add(parent, title, node_name, samples=samples, unit=unit)
        for process in node_processes:
            _draw_process(builder, context, pointing, parent=parent, process=process)
    readings = [clock for clock in trace.clocks if clock.node == context.first_node]
    if not readings:
        return TrackSet(builder.tracks, context.begin_ns)
    return TrackSet(builder.tracks, readings[0].monotonic_ns, readings[0].wall_ns)


def _draw_process(
    builder: _Builder, context: TraceContext, pointing: Arrows, *, parent: int, process: Process
) -> None:
    node_name = context.trace.nodes[process.node]
    name = f"rank {process.rank}" if process.rank != UNKNOWN else "process"
    name = f"{name}: {process.comm or 'pid'} {process.pid}"
    whole = f"{node_name} {name}".strip()
    process_track = builder.add(parent, name, whole)
    if process.row != UNKNOWN:
        for title, slices in _collectives(context, pointing, process.row):
            builder.add_slices(process_track, title, whole, slices)
        builder.add_slices(process_track, "waits", whole, _waits(context, pointing, process.row))
        builder.add_slices(process_track, "GPU", whole, _on_gpu(context, process.row))
    for title, slices in gpu_track.nccl_kernels(context, process):
        builder.add_slices(process_track, title, whole, slices)
    for title, slices in _labels(context, process.node, process.pid):
        builder.add_slices(process_track, title, whole, slices)
    builder.add_slices(process_track, "work", whole, _spans(context, process))
    builder.add_slices(
        process_track, "machine", whole, host_track.slices(*_of(context, context.trace.host_events, process))
    )
    for tid, calls, away in _threads(context, process):
        thread = f"thread {tid}"
        builder.add_slices(process_track, thread, whole, calls)
        builder.add_slices(process_track, f"{thread} off CPU", whole, away)
    for title, unit, samples in _counters(context, process):
        builder.add(process_track, title, whole, samples=samples, unit=unit)


def _verdicts(context: TraceContext, report: Report) -> list[Slice]:
    """A slice for each verdict; without a verdict one slice with the answer."""
    if report.verdicts:
        return [_verdict(context, verdict) for verdict in report.verdicts]
    summary = (
        "no rank slows down the others" if report.healthy else "; ".join(gap.reason for gap in report.gaps)
    )
    arguments: dict[str, Value] = {
        "summary": summary,
        "kind": str(report.answer),
        "ranks": "",
        "confidence": 0.0,
    }
    return [Slice(context.begin_ns, max(context.end_ns - context.begin_ns, 0), str(report.answer), arguments)]


def _verdict(context: TraceContext, verdict: Verdict) -> Slice:
    begin = context.begin_ns if verdict.since_ns is None else context.from_wall_ns(verdict.since_ns)
    end = context.end_ns if verdict.until_ns is None else context.from_wall_ns(verdict.until_ns)
    arguments: dict[str, Value] = {
        "summary": verdict.summary,
        "kind": verdict.kind,
        "ranks": ", ".join(map(str, verdict.ranks)),
        "confidence": verdict.confidence,
    }
    if verdict.causes:
        arguments["cause"] = ", ".join(f"{part.cause.name} {part.share:.0%}" for part in verdict.causes)
    if verdict.cost:
        arguments["gpu_seconds"] = verdict.cost.gpu_seconds
        if verdict.cost.at_most_gpu_seconds is not None:
            arguments["at_most_gpu_seconds"] = verdict.cost.at_most_gpu_seconds
    ranks = f" rank {', '.join(map(str, verdict.ranks[:4]))}" if verdict.ranks else ""
    return Slice(begin, max(end - begin, 0), f"{verdict.kind}{ranks}", arguments)


def _collectives(context: TraceContext, pointing: Arrows, process: int) -> Iterator[tuple[str, list[Slice]]]:
    """By communicator: from each arrival to the last rank's arrival, or to the next collective of the process."""
    timeline, matched = context.timeline, context.matched
    process_rows = np.flatnonzero(timeline.process == process)
    for comm in np.unique(timeline.comm[process_rows]).tolist():
        rows = process_rows[timeline.comm[process_rows] == comm]
        begin = context.clocks.arrival_ns[rows]
        following = np.append(begin[1:], context.end_ns)
        missing = matched.n_arrived[matched.round[rows]] < matched.n_arrived[matched.round[rows]].max()
        until = np.where(missing & (rows == rows[-1]), context.end_ns, matched.last_ns[matched.round[rows]])
        end = np.maximum(np.minimum(until, np.maximum(following, begin)), begin)
        first = timeline.rows[rows[0]]
        peer = f" with {int(first['peer_rank'])}" if timeline.is_p2p[rows[0]] else ""
        title = f"communicator {int(first['comm_hash']):016x} ({int(first['nranks'])} ranks){peer}"
        yield (
            title,
            [
                _arrival(context, pointing, row, begin_ns=b, end_ns=e)
                for row, b, e in zip(rows.tolist(), begin.tolist(), end.tolist(), strict=True)
            ],
        )


def _arrival(context: TraceContext, pointing: Arrows, row: int, *, begin_ns: int, end_ns: int) -> Slice:
    arrival, late_ns = context.timeline.rows[row], context.matched.late_ns[row]
    arguments: dict[str, Value] = {"round": int(arrival["seq"])}
    if arrival["count_bytes"] != UNKNOWN:
        arguments["bytes"] = int(arrival["count_bytes"])
    if arrival["datatype"]:
        arguments["datatype"] = word(Datatype, int(arrival["datatype"]))
    if not np.isnan(late_ns):
        arguments["late_ms"] = round(float(late_ns) / 1e6, 3)
    name = word(Op, int(arrival["op"]))
    return Slice(begin_ns, end_ns - begin_ns, name, arguments, starts=pointing.from_row.get(row, ()))


def _waits(context: TraceContext, pointing: Arrows, process: int) -> Iterator[Slice]:
    """The waits, and a moment of release for each arrow that ends at a wait."""
    process_waits = waits(context, process)
    for i, (enter, leave) in enumerate(
        zip(process_waits.enter_ns.tolist(), process_waits.leave_ns.tolist(), strict=True)
    ):
        yield Slice(enter, leave - enter, "wait")
        if ends := pointing.to_wait.get((process, i)):
            yield Slice(leave, 0, "released", ends=ends)


def _on_gpu(context: TraceContext, process: int) -> Iterator[Slice]:
    rows = context.timeline.rows[context.timeline.process == process]
    rows = rows[(rows["gpu_start_ns"] > 0) & (rows["gpu_end_ns"] >= rows["gpu_start_ns"])]
    begin = context.common_ns(int(context.timeline.node[process]), rows["gpu_start_ns"])
    length = rows["gpu_end_ns"] - rows["gpu_start_ns"]
    for row, at, took in zip(rows, begin.tolist(), length.tolist(), strict=True):
        yield Slice(at, took, word(Op, int(row["op"])), {"round": int(row["seq"])})


def _labels(context: TraceContext, node: int, pid: int) -> Iterator[tuple[str, list[Slice]]]:
    """The job's annotations by label. Each lasts until the next of its label; an empty value only ends the last."""
    rows = context.trace.annotations
    rows = rows[(rows["node"] == node) & (rows["pid"] == pid)]
    for label in sorted(set(rows["label"].tolist())):
        label_rows = np.sort(rows[rows["label"] == label], order="ts_ns", kind="stable")
        begin = context.common_ns(node, label_rows["ts_ns"]).tolist()
        name = label.decode("utf-8", "replace")
        values = [value.decode("utf-8", "replace") for value in label_rows["value"].tolist()]
        until = zip(values, begin, [*begin[1:], max(context.end_ns, *begin)], strict=True)
        yield name, [Slice(at, end - at, f"{name} {value}") for value, at, end in until if value]


def _spans(context: TraceContext, process: Process) -> Iterator[Slice]:
    rows, begin = _of(context, context.trace.spans, process)
    for row, at in zip(rows, begin, strict=True):
        label = row["label"].decode("utf-8", "replace") or word(Op, int(row["op"]))
        arguments: dict[str, Value] = {} if row["step"] == UNKNOWN else {"step": int(row["step"])}
        yield Slice(at, max(int(row["duration_ns"]), 0), label, arguments)


def _threads(context: TraceContext, process: Process) -> Iterator[tuple[int, list[Slice], list[Slice]]]:
    """By thread: its calls, and when it was off the CPU."""
    calls, call_at = _of(context, context.trace.calls, process)
    away, away_at = _of(context, context.trace.offcpu, process)
    for tid in sorted({*calls["tid"].tolist(), *away["tid"].tolist()}):
        yield (
            tid,
            [_call(context, calls[i], call_at[i]) for i in np.flatnonzero(calls["tid"] == tid).tolist()],
            [_off_cpu(context, away[i], away_at[i]) for i in np.flatnonzero(away["tid"] == tid).tolist()],
        )


def _call(context: TraceContext, row: Any, at_ns: int) -> Slice:
    symbol = int(row["symbol"])
    name = context.trace.symbols[symbol] if symbol < len(context.trace.symbols) else ""
    arguments: dict[str, Value] = {}
    if row["count_bytes"] != UNKNOWN:
        arguments["bytes"] = int(row["count_bytes"])
    return _lasting(context, row, at_ns, name=name or word(Op, int(row["op"])), arguments=arguments)


def _off_cpu(context: TraceContext, row: Any, at_ns: int) -> Slice:
    arguments: dict[str, Value] = {}
    if row["by_pid"] != UNKNOWN:
        arguments["cpu_went_to"] = f"{row['by_comm'].decode('utf-8', 'replace')} {int(row['by_pid'])}"
    if row["syscall_nr"] != UNKNOWN:
        arguments["syscall_nr"] = int(row["syscall_nr"])
    if row["waker_pid"] != UNKNOWN:
        arguments["woken_by"] = f"{int(row['waker_pid'])}/{int(row['waker_tid'])}"
    if row["flags"] & OffCpuFlag.PREEMPTED:
        arguments["was_runnable"] = True
    return _lasting(context, row, at_ns, name=word(Category, int(row["category"])), arguments=arguments)


def _lasting(context: TraceContext, row: Any, at_ns: int, *, name: str, arguments: dict[str, Value]) -> Slice:
    """A slice of a record whose end may be unknown. It then lasts to the end of the trace and is marked as open."""
    took = int(row["duration_ns"])
    if took == UNKNOWN:
        return Slice(at_ns, max(context.end_ns - at_ns, 0), name, arguments | {"is_open": True})
    return Slice(at_ns, took, name, arguments)


def _counters(
    context: TraceContext, process: Process
) -> Iterator[tuple[str, str, Sequence[tuple[int, float]]]]:
    """Counters from the snapshots: collectives so far, and the share of time in some categories of the time ledger."""
    rows, at = _of(context, context.trace.snapshots, process)
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


def _of(context: TraceContext, table: Array, process: Process) -> tuple[Array, list[int]]:
    """The rows of a process in a table, by time, and their times on the common clock."""
    rows = table[(table["node"] == process.node) & (table["pid"] == process.pid)]
    at = context.common_ns(process.node, rows["ts_ns"])
    order = np.argsort(at, kind="stable")
    return rows[order], at[order].tolist()
