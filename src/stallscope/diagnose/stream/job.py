"""One job of a stream: its rows, the schedule of its evaluations, its history and its incidents."""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from stallscope.diagnose import engine
from stallscope.diagnose.cost.delays import delays_by_process, device_delays
from stallscope.diagnose.findings import mismatch_findings
from stallscope.diagnose.processes import single
from stallscope.diagnose.report.examined import budget_of_case, of_case
from stallscope.diagnose.report.severity import severity
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.stream import candidates
from stallscope.diagnose.stream.call_errors import Failing
from stallscope.diagnose.stream.evaluation import Look, look
from stallscope.diagnose.stream.gpu_drivers import Drivers, explained
from stallscope.diagnose.stream.history import History, Tracks
from stallscope.diagnose.stream.incidents import Change, Incident, Incidents, Sighted, worded
from stallscope.diagnose.stream.job_members import Who
from stallscope.diagnose.stream.node_clocks import Nodes
from stallscope.diagnose.stream.open_hangs import Silence, hangs, usual_patience_ns
from stallscope.diagnose.stream.round_numbers import Numbering, is_late
from stallscope.diagnose.stream.trigger import Watch
from stallscope.diagnose.stream.window import Retention, Rows, chosen, complete, told_by_all
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.case import Case, case_of
from stallscope.diagnose.verdicts import claimed_rank, hang, mismatch, without_ledger
from stallscope.diagnose.verdicts.failure import with_failures
from stallscope.diagnose.verdicts.process_exit import with_deaths
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Trace

_FIXED_ROWS = 10_000  # fixed cost of an evaluation, in rows
_BURST = 4  # evaluations that may follow each other at once, after quiet times
_EVERY = 8  # periodic evaluations of each row, at most
_EVERY_BEHIND = 2  # ... and where the stream is behind
_GROWTH = (
    1.5  # a job with too few steps is evaluated again with this many times the rows
)
_LEAST_ROWS = 12  # of each process: fewer show no pattern
_MOST_ONCE = 8  # long delays of a rank that happened once
_JUDGED_STEPS = 8  # fewer judged steps show nothing typical


@dataclass
class Job:
    """A job of a stream.

    name: part of the ids of its incidents. lost: records lost on its nodes, by kind. drivers: GPU states of all nodes.
    """

    name: str
    limits: Thresholds
    retention: Retention
    usd_per_gpu_hour: float | None
    drivers: Drivers = field(default_factory=Drivers)
    rows: Rows = field(default_factory=Rows)
    history: History = field(default_factory=History)
    incidents: Incidents = field(default_factory=Incidents)
    numbering: Numbering = field(default_factory=Numbering)
    failing: Failing = field(default_factory=Failing)
    lost: dict[str, int] = field(default_factory=dict)
    members: set[Who] = field(default_factory=set)
    heard_at_ns: int = 0
    source: str = ""
    symbols: tuple[str, ...] = ("",)
    n_looks: int = 0
    n_rows_looked_at: int = 0
    _newest_ns: dict[Who, int] = field(default_factory=dict)
    _allowance: float = float(_BURST * _FIXED_ROWS)
    _n_since: int = 0
    _n_arrived: int = 0
    _n_at_hang: int = 0
    _ended_ns: dict[Who, int] = field(default_factory=dict)
    _enough_rows: int = 0
    _rows_a_step: float = 0.0

    def __post_init__(self) -> None:
        self.watch = Watch(least_ns=float(self.limits.min_late_ns), enough=self.limits.min_late_steps)
        self.silence = Silence(patience_ns=float(self.limits.hang_after_ns))

    def add(self, tables: dict[str, Array], at_ns: int) -> None:
        """Take rows of this job."""
        self.heard_at_ns = at_ns
        for name, rows in tables.items():
            if len(rows):
                self.rows.add(name, rows)
        if len(tables["calls"]):
            self.failing.note(tables["calls"])
        if len(tables["processes"]):
            self._note_ends(tables["processes"])
        arrived = tables["collectives"]
        if len(arrived):
            self.watch.add(arrived)
            self._n_since += len(arrived)
            self._n_arrived += len(arrived)
            self._allowance += self.retention.looks * len(arrived)

    def add_host_events(self, rows: Array) -> None:
        """Take host events on this job's processes."""
        if len(rows):
            self.rows.add("host_events", rows)

    def absorb(self, other: "Job") -> None:
        """Take over a job that has turned out to be part of this job."""
        other.rows.fold()
        for name, rows in other.rows.tables.items():
            if len(rows):
                self.rows.add(name, rows)
        self.watch.add(other.rows.tables["collectives"])
        self._n_since += other.rows.n
        self._n_arrived += other._n_arrived
        self.failing.absorb(other.failing)
        self._ended_ns.update(other._ended_ns)
        self._allowance = max(self._allowance, other._allowance)
        for mine, theirs in (
            (self.history.late, other.history.late),
            (self.history.device, other.history.device),
        ):
            mine.of.update(theirs.of)
        self.history.settled_ns.update(other.history.settled_ns)
        self.history.is_trimmed |= other.history.is_trimmed
        self.history.over += other.history.over
        self.incidents.open += other.incidents.open
        self.members |= other.members
        for kind, n in other.lost.items():
            self.lost[kind] = self.lost.get(kind, 0) + n

    def is_due(self, *, is_behind: bool = False) -> bool:
        """Whether the job needs an evaluation now, within its budget.

        is_behind: rows wait, so periodic evaluations are fewer.
        """
        n = self.rows.n
        if not self._n_since or n < max(_LEAST_ROWS * max(len(self.members), 1), self._enough_rows):
            return False
        every = _EVERY_BEHIND if is_behind else _EVERY
        is_worth = self.watch.is_due or self._n_since * every >= n + _FIXED_ROWS
        return is_worth and self._allowance >= n + _FIXED_ROWS

    def look(self, nodes: Nodes, at_ns: int, *, most_rows: int, is_last: bool = False) -> list[Change]:
        """Diagnose the complete rows, and drop old rows. is_last: the stream has ended."""
        was_urgent = self.watch.is_due
        self.rows.fold()
        n = self.rows.n
        burst = float(_BURST * (n + _FIXED_ROWS))
        self._allowance = min(self._allowance, burst) - (0 if is_last else n + _FIXED_ROWS)
        self._n_since, self.n_looks = 0, self.n_looks + 1
        self.n_rows_looked_at += n
        usable, right = self._usable(nodes, is_last=is_last)
        trace = self.trace(nodes, at_ns, right, usable=usable)
        if not usable.any() or without_ledger.is_for(trace) or single.is_single(trace):
            return self._told(trace, at_ns, is_last=is_last) if is_last or len(trace.spans) else []
        case = self._case(trace, is_numbered=right is not None)
        seen = look(case, self.rows.step[usable], self.history)
        self.rows.step[usable] = seen.step_of_row
        self._noted(seen)
        is_whole = is_last and not self.history.is_trimmed
        n_judged = seen.examined.n_steps
        self._enough_rows = 0 if n_judged >= _JUDGED_STEPS else int(_GROWTH * n)
        changes: list[Change] = []
        # While rounds are numbered again, an open incident is neither confirmed nor closed.
        if is_whole or (n_judged >= _JUDGED_STEPS and right is not None):
            shown = candidates.sightings(
                seen, self.history, self.incidents, is_whole=is_whole, is_usual=not was_urgent
            )
            changes = self._changed(self._explained(trace, shown), seen.step, at_ns, is_whole=is_whole)
        self._trim(seen, usable, most_rows)
        return changes

    def standstill(self, nodes: Nodes, at_ns: int, *, is_last: bool = False) -> list[Change]:
        """Check for a hang after enough time without calls."""
        last = self.watch.last_ns()
        if not last:
            return []
        ended = self._ended(nodes)
        now_ns = {node: nodes.now_ns(node, at_ns) for node in {who[0] for who in last}}
        silent = [now_ns[who[0]] - ns for who, ns in last.items() if who not in ended]
        patient = not self.silence.is_due(silent, is_one_gone=bool(ended), limits=self.limits)
        if patient and not is_last:
            return self._resumed(at_ns)
        if any(one.sighted.sort.startswith("mismatch") for one in self.incidents.open):
            return []
        self.rows.fold()
        right = None if is_last else self.numbering.put_right(self.rows.tables["collectives"])
        trace = self.trace(nodes, at_ns, right)
        if without_ledger.is_for(trace):
            return []
        case = self._case(trace, is_numbered=right is not None)
        self.silence.patience_ns = usual_patience_ns(case)
        if claims := claimed_rank.verdicts(case):
            shown = self._explained(trace, [candidates.claimed(verdict) for verdict in claims])
            return self.incidents.tell(shown, self.history.next_step, at_ns, job=self.name)
        if odd := mismatch.verdicts(case, mismatch_findings(case)):
            shown = self._explained(trace, [candidates.odd(worded(verdict)) for verdict in odd])
            return self.incidents.tell(shown, self.history.next_step, at_ns, job=self.name)
        self.n_looks, self.n_rows_looked_at = self.n_looks + 1, self.n_rows_looked_at + self.rows.n
        found = hangs(case)
        self._n_at_hang = self._n_arrived if found else self._n_at_hang
        return self._tell(trace, candidates.HANG, found, at_ns)

    def failed(self, nodes: Nodes, at_ns: int, *, is_last: bool = False) -> list[Change]:
        """Report failed CUDA calls, once each is known to end its process."""
        failing = self.failing
        is_due = failing.is_due(lambda node: nodes.now_ns(node, at_ns), self._ended(nodes), is_last=is_last)
        went_on = bool(failing.told) and failing.went_on(self.watch.last_ns())
        if is_last:
            return self._broke(nodes, at_ns)
        if not (is_due or went_on):
            return []
        self.rows.fold()
        trace = self.trace(nodes, at_ns)
        trace = replace(trace, calls=failing.judged(trace.calls))
        found = with_failures(trace, Report("", {}, [])).verdicts
        if went_on and not found:
            return self.incidents.end(at_ns, "the process continued", self._close, sort=candidates.FAILED)
        return self._tell(trace, candidates.FAILED, found, at_ns)

    def _broke(self, nodes: Nodes, at_ns: int) -> list[Change]:
        """Report the failure of a job that has ended: failed calls, or the rank that failed first."""
        self.rows.fold()
        trace = self.trace(nodes, at_ns)
        known = [one.sighted.verdict for one in self.incidents.open if one.sighted.sort == candidates.HANG]
        found = with_deaths(trace, with_failures(trace, Report("", {}, known))).verdicts
        broke = [verdict for verdict in found if verdict.kind == "failure"]
        return self._tell(trace, candidates.FAILED, broke, at_ns)

    def _tell(self, trace: Trace, sort: str, verdicts: list[Verdict], at_ns: int) -> list[Change]:
        """Report verdicts of a sort that does not depend on steps."""
        shown = [Sighted(sort, frozenset(), worded(verdict), -1, 0) for verdict in verdicts]
        return self.incidents.tell(
            self._explained(trace, shown), self.history.next_step, at_ns, job=self.name
        )

    def _explained(self, trace: Trace, shown: list[Sighted]) -> list[Sighted]:
        """The candidates with their GPUs, processes and severity."""
        ts_ns = trace.collectives["ts_ns"]
        observed_ns = self.history.gone_ns + (float(ts_ns.max() - ts_ns.min()) if len(ts_ns) else 0.0)
        gpu_seconds = len(self.members) * observed_ns / 1e9
        return [
            replace(
                one, verdict=replace(one.verdict, severity=severity(one.verdict, gpu_seconds, self.limits))
            )
            for one in explained(trace, shown)
        ]

    def _resumed(self, at_ns: int) -> list[Change]:
        """Close a hang whose ranks continue."""
        if self.silence.n_silent or self._n_arrived == self._n_at_hang:
            return []
        return self.incidents.end(at_ns, "the ranks continue", self._close, sort=candidates.HANG)

    def trace(
        self, nodes: Nodes, at_ns: int, right: Array | None = None, *, usable: Array | None = None
    ) -> Trace:
        """The remaining rows as a trace. right: collectives with corrected rounds. usable: the rows to include."""
        tables: dict[str, Any] = dict(self.rows.tables)
        if right is not None:
            tables["collectives"] = right
        if usable is not None and not usable.all():
            tables["collectives"] = chosen(tables["collectives"], usable)
        mine = {who[0] for who in self.members}
        tables |= self.drivers.of(mine)
        return Trace(
            **tables,
            nodes=nodes.names,
            symbols=self.symbols,
            clocks=nodes.clocks(mine),
            probed=nodes.probed(mine),
            lost=dict(self.lost),
            ends_ns=tuple(
                nodes.now_ns(node, at_ns) if node in mine else UNKNOWN for node in range(len(nodes.names))
            ),
            source=self.source,
        )

    def _usable(self, nodes: Nodes, *, is_last: bool) -> tuple[Array, Array | None]:
        """Which collectives to evaluate, and all of them with corrected rounds; None where these must be recomputed."""
        rows = self.rows.tables["collectives"]
        right = None if is_last and is_late(rows) else self.numbering.put_right(rows)
        if is_last:
            return np.ones(len(rows), bool), right
        if right is not None:
            return complete(right, self.retention.lag_ns), right
        wall_ns = nodes.wall_ns(rows)
        if wall_ns is None:
            return np.ones(len(rows), bool), right
        return told_by_all(rows, wall_ns, self.retention.lag_ns), right

    def _case(self, trace: Trace, *, is_numbered: bool = False) -> Case:
        """The case of the remaining rows. is_numbered: the rounds of ranks that were attached late are corrected."""
        case = case_of(trace, self.limits, self.usd_per_gpu_hour, is_numbered=is_numbered)
        if not is_numbered:
            self.numbering.note(trace.collectives, case.line.rows)
        return case

    def report(self, nodes: Nodes, at_ns: int) -> Report:
        """The report on the job, from its history and its rows."""
        self.rows.fold()
        trace = self.trace(nodes, at_ns)
        if not self.history.is_trimmed or without_ledger.is_for(trace):
            return engine.diagnose(trace, self.limits, usd_per_gpu_hour=self.usd_per_gpu_hour)
        seen = look(self._case(trace), self.rows.step, self.history)
        verdicts = candidates.report(seen, self.history, self.incidents, standstill=hang.verdicts(seen.case))
        counts, evidence = of_case(seen.case)
        whole = {
            "n_rounds": sum(seen.examined.n_rounds.values()),
            "n_steps": seen.examined.n_steps,
            "seconds": round(seen.examined.observed_ns / 1e9, 3),
        }
        found = Report(
            source=self.source,
            examined=counts | whole,
            verdicts=verdicts,
            evidence=replace(evidence, n_steps=seen.examined.n_steps),
            budget=budget_of_case(seen.case),
        )
        return engine.completed(trace, found, self.limits)

    def has_ended(self, nodes: Nodes) -> bool:
        """Whether all its processes have ended before the latest events of their nodes."""
        return bool(self.members) and self._ended(nodes) >= self.members

    def end(self, at_ns: int, reason: str) -> list[Change]:
        """Close all incidents."""
        return self.incidents.end(at_ns, reason, self._close)

    def _note_ends(self, processes: Array) -> None:
        for node, pid, ended_ns in processes[["node", "pid", "ended_ns"]].tolist():
            if ended_ns != UNKNOWN:
                self._ended_ns[node, pid] = ended_ns

    def _ended(self, nodes: Nodes) -> set[Who]:
        return {who for who, ended_ns in self._ended_ns.items() if ended_ns <= nodes.heard_ns(who[0])}

    def _noted(self, seen: Look) -> None:
        """Update the state that the trigger and the next evaluation depend on."""
        case, history = seen.case, self.history
        line = case.line
        for process, newest_ns in enumerate(line.ts_ns[line.first[1:] - 1].tolist()):
            self._newest_ns[case.who(process)] = newest_ns
        history.next_step = seen.step + 1
        n_steps = len(np.unique(seen.step_of_row))
        self._rows_a_step = len(line.rows) / max(n_steps, 1)
        self.silence.patience_ns = usual_patience_ns(case)
        self.watch.looked(step_ns=case.step_ns, least_ns=self.limits.source_share * case.pace.least_ns)

    def _told(self, trace: Trace, at_ns: int, *, is_last: bool) -> list[Change]:
        """The changes for a source without a time ledger: all remaining rows are judged."""
        found = engine.diagnose(trace, self.limits, usd_per_gpu_hour=self.usd_per_gpu_hour).verdicts
        shown = [Sighted(f"{one.kind} {one.ranks}", frozenset(), one, -1, 0, 0) for one in found]
        self.history.next_step += 1
        return self._changed(shown, self.history.next_step, at_ns, is_whole=is_last)

    def _changed(self, shown: list[Sighted], step: int, at_ns: int, *, is_whole: bool) -> list[Change]:
        return self.incidents.seen(
            shown, step=step, at_ns=at_ns, is_whole=is_whole, closing=self._close, job=self.name
        )

    def _close(self, incident: Incident, reason: str) -> None:
        """Separate the delays of a closed incident from the delays of the next incident."""
        sort, history = incident.sighted.sort, self.history
        if sort == candidates.MOVES:
            taken = {
                who
                for one in self.incidents.open
                if one.sighted.sort == candidates.RANK
                for who in one.sighted.who
            }
            self._end_tracks(history.late, set(self._newest_ns) - taken)
        if sort == candidates.RANK:
            self._end_tracks(history.late, set(incident.sighted.who))
            self._end_tracks(history.device, set(incident.sighted.who))
        history.add_over(incident.sighted.verdict)

    def _end_tracks(self, tracks: Tracks, processes: set[Who]) -> None:
        for who in processes:
            track = tracks.track(who)
            track.end()
            track.over_ns = self._newest_ns.get(who, track.over_ns)

    def _trim(self, seen: Look, usable: Array, most_rows: int) -> None:
        """Move old late steps to the history, and drop old rows.

        The older half of the rows is dropped. Late steps in the older half of the remaining rows move to the history as
        well, so that each late step is judged with as many rows before it as after it.
        """
        kept = self.retention
        wanted = max(kept.least_rows, min(kept.most_rows, int(kept.n_steps * self._rows_a_step)))
        if self.rows.n <= min(wanted, most_rows):
            return
        case, history = seen.case, self.history
        arrival = case.arrival_ns
        half, three_quarters = len(arrival) // 2, 3 * len(arrival) // 4
        ordered = np.partition(arrival, (half, three_quarters))
        cut, until = float(ordered[half]), float(ordered[three_quarters])
        if not history.is_trimmed:
            history.is_trimmed = True
            history.first_step = int(seen.found.case.judged.step.min(initial=0))
            first = np.full(len(case.line.comm_hash), np.iinfo(np.int64).max)
            np.minimum.at(first, case.line.comm, case.line.rows["seq"])
            for comm, seq in zip(case.line.comm_hash.tolist(), first.tolist(), strict=True):
                history.first_seq[comm] = min(seq, history.first_seq.get(comm, seq))
        self._settle(seen, until)
        old = _before_step_at(case, cut)
        gone = np.zeros(len(usable), bool)
        gone[np.flatnonzero(usable)[old]] = True
        history.gone_ns += float(arrival[~old].min()) - float(arrival.min())
        self.rows.keep(~gone, most_side_rows=max(min(wanted, most_rows), 1))

    def _settle(self, seen: Look, until: float) -> None:
        """Move late steps up to a time on the common clock to the history."""
        case, history = seen.case, self.history
        late = [one for mine in seen.live.values() for one in mine if case.arrival_ns[one.peak_row] <= until]
        for one in [one for one in late if (one.process, one.step) in seen.once]:
            track = history.late.track(case.who(one.process))
            track.once = [*track.once, delays_by_process(case, [one])[one.process]][-_MOST_ONCE:]
        late = [one for one in late if (one.process, one.step) not in seen.once]
        for is_over, is_named in product((True, False), (True, False)):
            part = [
                one
                for one in late
                if (seen.ts_ns(one) <= history.late.track(case.who(one.process)).over_ns) == is_over
                and (one.process in seen.found.named) == is_named
            ]
            processes = seen.found.named if is_named else {one.process for one in part}
            for process, delays in delays_by_process(case, part, among=seen.late_of(processes)).items():
                history.late.track(case.who(process)).add(delays, is_over=is_over)
        for process, mine in seen.device.items():
            track = history.device.track(case.who(process))
            old = [one for one in mine if case.arrival_ns[one.peak_row] <= until]
            for is_over in (True, False):
                part = [one for one in old if (seen.ts_ns(one) <= track.over_ns) == is_over]
                if part:
                    track.add(device_delays(case, process, part), is_over=is_over)
        for process, ts in _latest_before(case.line.process, case.arrival_ns, until, case.line.rows["ts_ns"]):
            history.settled_ns[case.who(process)] = ts


def _before_step_at(case: Case, cut: float) -> Array:
    """Rows before the step that is running at a time on the common clock, in each program: bool (n,)."""
    step, program = case.plan.step, case.plan.program[case.line.process]
    first = np.full(int(program.max()) + 1, np.iinfo(np.int64).max)
    after = (case.arrival_ns >= cut) & (step >= 0)
    np.minimum.at(first, program[after], step[after])
    old: Array = np.where(
        first[program] < np.iinfo(np.int64).max, step < first[program], case.arrival_ns < cut
    )
    return old


def _latest_before(process: Array, arrival_ns: Array, until: float, ts_ns: Array) -> list[tuple[int, int]]:
    """The last row of each process up to a time on the common clock: (process, time on its node's clock)."""
    old = arrival_ns <= until
    newest = np.full(int(process.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(newest, process[old], ts_ns[old])
    return [(p, int(ts)) for p, ts in enumerate(newest.tolist()) if ts > np.iinfo(np.int64).min]
