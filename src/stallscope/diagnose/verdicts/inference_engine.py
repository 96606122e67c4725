"""The verdicts on inference engines: the reason for late requests (`latency`), and engines that no longer answer
(`dead_server`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stallscope.diagnose.causes import Explained
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.evidence_fields import CauseEvidence, RequestPart, VerdictEvidence
from stallscope.diagnose.processes.buckets import text_of
from stallscope.diagnose.processes.code_locations import function, is_python, user_line
from stallscope.diagnose.report import text
from stallscope.diagnose.report.conclusion import graded
from stallscope.diagnose.report.evidence import Evidence, from_counts
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.serving.dead_servers import DeadServer, dead_servers
from stallscope.diagnose.serving.endpoints import endpoints
from stallscope.diagnose.serving.engine_threads import Threads
from stallscope.diagnose.serving.joined_spans import JoinedSpans, joined_spans
from stallscope.diagnose.serving.late_delay import Delay, merged
from stallscope.diagnose.serving.late_reason import Reason
from stallscope.diagnose.serving.late_requests import Late, late_requests
from stallscope.diagnose.serving.own_metrics import differences, span_differences
from stallscope.diagnose.serving.reasons import reason_of
from stallscope.diagnose.serving.request_path import mean_parts
from stallscope.diagnose.serving.server_advice import advice
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.verdicts._owners import with_owners
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.request_clients import key_numbers
from stallscope.events.trace import Gap, Trace

_LARGE_SHARE = 0.35
_MAX_LATE = 2000
"""Late requests that are explained, the latest: enough for the shares of the causes."""

_MIN_CLIENTS = 5
"""With fewer clients, their share is not evidence: each client sends a large share of the requests."""


def has_engines(trace: Trace) -> bool:
    """Whether a trace has processes of inference engines."""
    return len(trace.servers) > 0 or len(trace.requests) > 0


def is_only(trace: Trace) -> bool:
    """Whether a trace has engines and no calls to judge."""
    others = (trace.collectives, trace.calls, trace.spans, trace.operations)
    return has_engines(trace) and not any(map(len, others))


def report(trace: Trace, limits: Thresholds) -> Report:
    """The report on a trace of engines without GPU calls; with_engines() adds the verdicts."""
    pids = np.unique(trace.servers[["node", "pid"]])
    times = np.concatenate([trace.servers["ts_ns"], trace.requests["ts_ns"], trace.requests["end_ns"]])
    counts: dict[str, object] = {
        "n_ranks": len(pids),
        "n_nodes": len(trace.nodes),
        "n_communicators": 0,
        "n_rounds": 0,
        "n_steps": 0,
        "n_requests": len(trace.requests),
        "n_lost_records": sum(trace.lost.values()),
        "seconds": round(float(times.max() - times.min()) / 1e9, 3) if len(times) else 0.0,
    }
    return Report(trace.source, counts, [], evidence=_evidence(trace, counts, limits))


def _evidence(trace: Trace, counts: dict[str, object], limits: Thresholds) -> Evidence:
    """A trace with few requests does not show that an engine is healthy."""
    coverage, n = trace.coverage, len(trace.requests)
    if n < limits.min_requests:
        gap = Gap(
            f"{n} requests are too few to show late requests", "Trace the engine while it answers requests."
        )
        coverage = replace(coverage, gaps=(*coverage.gaps, gap))
    return replace(from_counts(counts, coverage), n_steps=None)


def with_engines(trace: Trace, whole: Report, limits: Thresholds) -> Report:
    """The report on all jobs with the verdicts on engines, and a remark on each endpoint."""
    if not has_engines(trace):
        return whole
    worded = verdicts(trace, whole, limits)
    remarks: list[dict[str, object]] = [
        {"what": f"Requests to {each.path} of {each.engine}", **each.numbers()} for each in endpoints(trace)
    ]
    for node, pids in _groups(trace):
        remarks += differences(trace, node, pids)
        remarks += span_differences(trace, node, pids)
    return replace(whole, verdicts=[*worded, *whole.verdicts], benign=[*whole.benign, *remarks])


def verdicts(trace: Trace, whole: Report, limits: Thresholds) -> list[Verdict]:
    """The verdicts on engines, with owner, severity and summary. whole: states the examined time."""
    owned = with_owners(trace, [*_dead(trace, limits), *_latency(trace, limits)])
    return [replace(each, summary=text.summary(each)) for each in graded(owned, whole, limits)]


def _groups(trace: Trace) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Node and processes of each engine. The last group of a process counts: its parent may be recognised later."""
    order = np.argsort(trace.servers["ts_ns"], kind="stable")
    keys = trace.servers[["node", "pid", "group_pid"]][order].tolist()
    groups: dict[tuple[int, int], list[int]] = {}
    for (node, pid), group_pid in {(node, pid): group_pid for node, pid, group_pid in keys}.items():
        groups.setdefault((node, group_pid), []).append(pid)
    for (node, _), pids in sorted(groups.items()):
        yield node, tuple(sorted(pids))


def _latency(trace: Trace, limits: Thresholds) -> Iterator[Verdict]:
    for node, pids in _groups(trace):
        requests = trace.requests[(trace.requests["node"] == node) & np.isin(trace.requests["pid"], pids)]
        if len(requests) < limits.min_requests:
            continue
        late = [
            each
            for path in np.unique(requests["path"])
            for each in late_requests(trace, requests[requests["path"] == path], limits)
        ]
        whole_ns = float((requests["end_ns"] - requests["ts_ns"]).sum())
        lost_ns = sum(each.excess_ns for each in late)
        if len(late) < limits.min_late_requests or lost_ns < limits.late_request_share * whole_ns:
            continue
        latest = sorted(late, key=lambda each: each.begin_ns)[-_MAX_LATE:]
        yield from _explained(trace, Threads.of(trace, node, pids), requests, latest)


def _explained(trace: Trace, threads: Threads, requests: Array, late: list[Late]) -> Iterator[Verdict]:
    """A verdict for each reason that explains a large share of the excess, the largest first."""
    by_cause: dict[str, list[tuple[Delay, Reason]]] = {}
    spans = merged([(each.begin_ns, each.end_ns) for each in late])
    for each in late:
        delay = Delay(each, threads, requests, threads.off(each.begin_ns, each.end_ns), spans)
        reason = reason_of(delay)
        by_cause.setdefault(reason.cause, []).append((delay, reason))
    whole_ns = sum(each.excess_ns for each in late)
    shares = {
        name: sum(delay.late.excess_ns for delay, _ in parts) / whole_ns for name, parts in by_cause.items()
    }
    has_front_end = any(delay.leaves_front_end for parts in by_cause.values() for delay, _ in parts)
    for name in sorted(shares, key=lambda each: -shares[each]):
        if shares[name] >= _LARGE_SHARE:
            paths = [delay.parts(has_front_end=has_front_end) for delay, _ in by_cause[name]]
            late_reasons = [(delay.late, reason) for delay, reason in by_cause[name]]
            verdict = _verdict(trace, requests, late_reasons, shares[name], mean_parts(paths))
            late_rows = np.array([late.request for late, _ in late_reasons], requests.dtype)
            yield _with_spans(verdict, joined_spans(trace, late_rows))


def _with_spans(verdict: Verdict, spans: JoinedSpans | None) -> Verdict:
    """The verdict with the times of the engine's own spans."""
    if not spans:
        return verdict
    evidence = replace(
        verdict.evidence, n_spans=spans.n, engine_ms=spans.own_ms, recorded_ms=spans.recorded_ms
    )
    return replace(verdict, evidence=evidence)


def _verdict(
    trace: Trace,
    requests: Array,
    late_reasons: list[tuple[Late, Reason]],
    share: float,
    parts: list[RequestPart] | None,
) -> Verdict:
    late = [each for each, _ in late_reasons]
    reason = _typical(late_reasons)
    row = max(late, key=lambda each: each.excess_ns).request
    excess_ms = np.array([each.excess_ns for each in late]) / 1e6
    node, pid = int(row["node"]), reason.pid or int(row["pid"])
    of_cause = cause(reason.cause)
    n_late_clients, n_clients = _clients_hit(requests, late)
    begins = min(each.begin_ns for each in late), max(each.end_ns for each in late)
    is_unknown = reason.cause == "unknown"
    return Verdict(
        kind="latency",
        summary="",
        nodes=[trace.nodes[node]] if trace.nodes[node] else [],
        pids=[pid] if reason.pid else [],
        late_ms={"median": round(float(np.median(excess_ms)), 3), "max": round(float(excess_ms.max()), 3)},
        since_ns=wall_ns(trace, node, begins[0]),
        until_ns=wall_ns(trace, node, begins[1]),
        n_incidents=len(late),
        causes=[Explained(of_cause, round(share, 4), float(excess_ms.sum() * 1e6), reason.evidence)],
        confidence=0.4 if is_unknown else round(min(0.95, 0.6 + 0.05 * len(late)) * min(1.0, share / 0.6), 2),
        advice=advice(of_cause, reason.evidence, parts),
        abstained_because="no activity of the engine's threads explains the delay" if is_unknown else None,
        evidence=VerdictEvidence(
            engine=text_of(row, "engine"),
            model=text_of(row, "model") or None,
            endpoint=text_of(row, "path"),
            part=max({each.part for each in late}, key=lambda part: sum(each.part == part for each in late)),
            n_late_requests=len(late),
            n_requests=len(requests),
            n_late_clients=n_late_clients,
            n_clients=n_clients,
            pid=reason.pid or None,
            command=_command(trace, node, pid) if reason.pid else None,
            line=reason.evidence.line,
            parts=parts,
        ),
    )


def _clients_hit(requests: Array, late: list[Late]) -> tuple[int | None, int | None]:
    """How many clients have a late request, and how many there are; None if there are fewer than _MIN_CLIENTS.

    A client is an address, so the clients behind a proxy count as one. A client has another hash after each start of
    the agent, so only the clients since one start are counted: the start with the most late clients.
    """
    clients = np.unique(requests["client"][requests["client"] != UNKNOWN])
    of_late = np.unique([each.request["client"] for each in late])
    starts, late_starts = key_numbers(clients), key_numbers(of_late[of_late != UNKNOWN])
    counts = [
        (int((late_starts == start).sum()), int((starts == start).sum())) for start in np.unique(starts)
    ]
    n_late, n = max(counts, default=(0, 0))
    return (n_late, n) if n >= _MIN_CLIENTS else (None, None)


def _typical(parts: list[tuple[Late, Reason]]) -> Reason:
    """The reason with the process and the function that explain most of the delay.

    A reason with a line of Python comes first, then a reason with another line.
    """
    times = Counter[tuple[int, int, tuple[str, str]]]()
    for late, reason in parts:
        times[_location(reason)] += late.excess_ns
    most = max(location[0] for location in times)
    chosen = max((each for each in times if each[0] == most), key=lambda location: times[location])
    return max((part for part in parts if _location(part[1]) == chosen), key=lambda part: part[0].excess_ns)[
        1
    ]


def _location(reason: Reason) -> tuple[int, int, tuple[str, str]]:
    """How precisely a line is known (0 to 2), the process, and the function of the line."""
    line = reason.evidence.line or ""
    return bool(line) + is_python(line), reason.pid, function(line)


def _dead(trace: Trace, limits: Thresholds) -> Iterator[Verdict]:
    for node, pids in _groups(trace):
        if dead := dead_servers(trace, node, pids, limits):
            yield _dead_verdict(trace, dead)


def _dead_verdict(trace: Trace, dead: DeadServer) -> Verdict:
    row = dead.row
    of_cause = cause(dead.cause)
    evidence = CauseEvidence(line=user_line(dead.stack) or None)
    return Verdict(
        kind="dead_server",
        summary="",
        nodes=[trace.nodes[dead.node]] if trace.nodes[dead.node] else [],
        pids=[dead.pid],
        since_ns=wall_ns(trace, dead.node, dead.since_ns),
        n_incidents=1,
        causes=[Explained(of_cause, 1.0, float(dead.waited_ns), evidence)],
        confidence=0.9 if dead.stack or dead.cause == "process_stopped" else 0.7,
        advice=["Restart the engine, and route its requests to other servers."],
        evidence=VerdictEvidence(
            engine=text_of(row, "engine"),
            model=text_of(row, "model") or None,
            endpoint=text_of(row, "oldest_path"),
            n_requests=int(row["n_open"]),
            pid=dead.pid,
            command=_command(trace, dead.node, dead.pid),
            line=evidence.line,
            stack=list(dead.stack) or None,
            waited_s=round(dead.waited_ns / 1e9, 1),
        ),
    )


def _command(trace: Trace, node: int, pid: int) -> str | None:
    rows = trace.processes[(trace.processes["node"] == node) & (trace.processes["pid"] == pid)]
    return rows["comm"][-1].decode("utf-8", "replace") if len(rows) else None
