"""One job of a stream: its rows, the schedule of its evaluations, its history and its incidents."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from stallscope.diagnose import engine
from stallscope.diagnose.cost.delays import delays_by_process
from stallscope.diagnose.cost.step_growth import baseline_before
from stallscope.diagnose.findings import mismatch_findings
from stallscope.diagnose.processes import single
from stallscope.diagnose.report.evidence import Evidence
from stallscope.diagnose.report.examined import budget_of_case, of_case
from stallscope.diagnose.report.severity import severity
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.stream import candidates, on_gpus
from stallscope.diagnose.stream.call_errors import FailedCalls
from stallscope.diagnose.stream.evaluation import Evaluation, evaluate, measured, measured_device
from stallscope.diagnose.stream.gpu_drivers import Drivers, explained
from stallscope.diagnose.stream.history import History, Tracks
from stallscope.diagnose.stream.incidents import Candidate, Change, Incident, Incidents, worded
from stallscope.diagnose.stream.job_members import ProcessKey
from stallscope.diagnose.stream.job_state import JobState, Member, answered, silent_nodes
from stallscope.diagnose.stream.node_clocks import Nodes
from stallscope.diagnose.stream.open_hangs import Silence, hangs, job_patience_ns
from stallscope.diagnose.stream.round_numbers import Numbering, has_late_ranks
from stallscope.diagnose.stream.trigger import Trigger
from stallscope.diagnose.stream.window import (
    Retention,
    Rows,
    ThinnedRounds,
    before_first_kept,
    chosen,
    complete,
    covered_by_all,
)
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.case import Case, case_of
from stallscope.diagnose.timeline.round_samples import in_common_sample
from stallscope.diagnose.verdicts import change, claimed_rank, hang, inconclusive, mismatch, without_ledger
from stallscope.diagnose.verdicts._owners import common_owner, owners_in
from stallscope.diagnose.verdicts.failure import with_failures
from stallscope.diagnose.verdicts.process_exit import with_deaths
from stallscope.events.layout import UNKNOWN, Array, process_keys
from stallscope.events.trace import Gap, Trace

_FIXED_ROWS = 10_000  # fixed cost of an evaluation, in rows
_BURST = 4  # evaluations that may follow each other at once, after quiet times
_EVERY = 8  # periodic evaluations of each row, at most
_EVERY_BEHIND = 2  # ... and where the stream is behind
_GROWTH = 1.5  # a job with too few steps is evaluated again with this many times the rows
_QUIET_NS = 2_000_000_000  # agents send about once a second
_RARELY_NS = 50_000  # for each row: evaluations of quiet jobs use a few percent of a core
_HANG_CHECK_NS = 10_000  # for each row: ranks whose agents are behind fall silent again and again
_MIN_ROWS = 12  # of each process: fewer show no pattern
_MAX_ONE_OFF_DELAYS = 8  # long delays of a rank that happened once
_MAX_ROWS_WITHOUT_ROUNDS = 1 << 14  # rows of other tables, of a job without collectives
_SILENT_LAGS = 2  # times the longest wait for a node that is behind, after which its agent is silent
_JUDGED_STEPS = 8  # fewer judged steps show nothing typical
_MAX_SAMPLE = 64  # the largest k of every k-th round
_THINNED_NS = 60_000_000_000
_MAX_THINNED = 8  # thinned stretches of rounds whose rows may still arrive: nodes are some seconds apart

SKIPPED = "skipped_by_hub"
"""The kind of lost records that were received, but not examined."""


@dataclass
class Job:
    """A job of a stream.

    name: part of the ids of its incidents. lost: records lost on its nodes among the rows that are kept, by kind; of
    dropped rows, the same share of the losses is dropped. drivers: GPU states of all nodes.
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
    failed_calls: FailedCalls = field(default_factory=FailedCalls)
    lost: dict[str, int] = field(default_factory=dict)
    members: set[ProcessKey] = field(default_factory=set)
    latest_at_ns: int = 0
    source: str = ""
    symbols: tuple[str, ...] = ("",)
    n_evaluations: int = 0
    n_rows_examined: int = 0
    evidence: Evidence | None = None
    ranks: dict[ProcessKey, int] = field(default_factory=dict)
    comm_hash: int = 0
    _comm_size: int = 0
    _begin_ns: dict[int, int] = field(default_factory=dict)
    _alive_ns: dict[int, tuple[int, int]] = field(default_factory=dict)
    _evaluated_at_ns: int = 0
    _hang_checked_at_ns: int = 0
    _newest_ns: dict[ProcessKey, int] = field(default_factory=dict)
    _allowance: float = float(_BURST * _FIXED_ROWS)
    _n_since: int = 0
    _n_arrived: int = 0
    _n_at_hang: int = 0
    _ended_ns: dict[ProcessKey, int] = field(default_factory=dict)
    _enough_rows: int = 0
    _rows_a_step: float = 0.0
    _thinned: list[ThinnedRounds] = field(default_factory=list)
    _n_left_out: int = 0
    _sample: int = 1

    def __post_init__(self) -> None:
        self.trigger = Trigger(min_ns=float(self.limits.min_late_ns), enough=self.limits.min_late_steps)
        self.silence = Silence(patience_ns=float(self.limits.hang_after_ns))

    def add(self, tables: dict[str, Array], at_ns: int) -> None:
        """Take rows of this job."""
        self.latest_at_ns = at_ns
        self._thinned = [part for part in self._thinned if at_ns - part.at_ns < _THINNED_NS]
        tables = tables | {"collectives": self._of_thinned_rounds(tables["collectives"])}
        for name, rows in tables.items():
            if len(rows):
                self.rows.add(name, rows)
        if not self.rows.n:
            self.rows.bound(_MAX_ROWS_WITHOUT_ROUNDS)
        if len(tables["calls"]):
            self.failed_calls.note(tables["calls"])
        if len(tables["processes"]):
            self._note_ends(tables["processes"])
        for rows in (tables["processes"], tables["snapshots"]):
            for row in rows[[0, -1]] if len(rows) else ():
                self._note_life(int(row["node"]), int(row["ts_ns"]))
        arrived = tables["collectives"]
        if len(arrived):
            self.trigger.add(arrived)
            self._note_communicator(arrived)
            self._begin_ns.setdefault(int(arrived["node"][0]), int(arrived["ts_ns"][0]))
            self._n_since += len(arrived)
            self._n_arrived += len(arrived)
            self._allowance += self.retention.max_evaluations * len(arrived)

    def thin_out(self) -> None:
        """Keep at most half of the rows: the rows of every k-th round, or the newest rows if most have no round.

        An evaluation drops old rows of complete rounds only. Other rows pile up while nodes send at different times.
        Later rows of the dropped rounds, from nodes that are behind, are dropped as well.
        """
        self.rows.fold()
        rows, every = self.rows.tables["collectives"], 1
        kept = np.ones(len(rows), bool)
        while every < _MAX_SAMPLE and 2 * np.count_nonzero(kept) > len(rows):
            every *= 2
            kept = (rows["seq"] % every == 0) | (rows["seq"] == UNKNOWN)
        if 2 * np.count_nonzero(kept) > len(rows):
            every, kept = 1, _newest_half(rows)
        else:
            self._thinned = [*self._thinned, ThinnedRounds.of(rows, every, self.latest_at_ns)][-_MAX_THINNED:]
        self.rows.keep(kept, max_side_rows=self.rows.n_all // 8)
        self._n_since = min(self._n_since, self.rows.n)
        n_dropped = len(rows) - self.rows.n
        if every == 1:
            self.note_lost({SKIPPED: n_dropped})
        self._n_left_out, self._sample = self._n_left_out + n_dropped, every

    def _of_thinned_rounds(self, rows: Array) -> Array:
        """Arriving collectives without the rounds that thin_out() has dropped."""
        if not self._thinned or not len(rows):
            return rows
        kept = np.logical_and.reduce([thinned.has(rows) for thinned in self._thinned])
        if kept.all():
            return rows
        self._n_left_out += int(np.count_nonzero(~kept))
        return chosen(rows, kept)

    def left_out(self) -> tuple[int, int]:
        """The collectives that were dropped since the last call, because too many were kept, and the k of the rounds
        that remain; 1 if the oldest were dropped.
        """
        n_left_out, self._n_left_out = self._n_left_out, 0
        return n_left_out, self._sample

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
        self.trigger.add(other.rows.tables["collectives"])
        self._n_since += other.rows.n
        self._n_arrived += other._n_arrived
        self.failed_calls.absorb(other.failed_calls)
        self._ended_ns.update(other._ended_ns)
        self._allowance = max(self._allowance, other._allowance)
        for tracks, other_tracks in (
            (self.history.late, other.history.late),
            (self.history.device, other.history.device),
        ):
            tracks.of.update(other_tracks.of)
        self.history.settled_ns.update(other.history.settled_ns)
        self._thinned = [*self._thinned, *other._thinned][-_MAX_THINNED:]
        self._n_left_out, self._sample = (
            self._n_left_out + other._n_left_out,
            max(self._sample, other._sample),
        )
        self.history.is_trimmed |= other.history.is_trimmed
        self.history.over += other.history.over
        self.incidents.open += other.incidents.open
        self.members |= other.members
        self.ranks = other.ranks | self.ranks
        largest = max((self._comm_size, -self.comm_hash), (other._comm_size, -other.comm_hash))
        self._comm_size, self.comm_hash = largest[0], -largest[1]
        self._begin_ns = other._begin_ns | self._begin_ns
        for node, times_ns in other._alive_ns.items():
            for ns in times_ns:
                self._note_life(node, ns)
        self.note_lost(other.lost)

    def is_due(self, *, max_rows: int, is_behind: bool = False) -> bool:
        """Whether the job needs an evaluation now, within its budget.

        max_rows: see evaluate(). Beyond it evaluations are not fewer, because only an evaluation drops old rows.
        is_behind: rows wait, so periodic evaluations are fewer.
        """
        n = self.rows.n
        enough = min(self._enough_rows, max_rows)
        if not self._n_since or n < max(_MIN_ROWS * max(len(self.members), 1), enough):
            return False
        every = _EVERY_BEHIND if is_behind and n < max_rows else _EVERY
        is_worth = self.trigger.is_due or self._n_since * every >= n + _FIXED_ROWS
        return is_worth and self._allowance >= n + _FIXED_ROWS

    def is_quiet(self, at_ns: int) -> bool:
        """Whether rows that no evaluation has examined are the last for now, so that verdicts may be out of date."""
        n = self.rows.n
        if not self._n_since or n < _MIN_ROWS * max(len(self.members), 1):
            return False
        if at_ns - self.latest_at_ns < _QUIET_NS:
            return False
        return self._allowance >= n + _FIXED_ROWS or at_ns - self._evaluated_at_ns >= n * _RARELY_NS

    def evaluate(
        self, nodes: Nodes, at_ns: int, *, max_rows: int, is_last: bool = False, is_exact: bool = False
    ) -> list[Change]:
        """Diagnose the complete rows, and drop old rows.

        is_last: the stream has ended. is_exact: small changes of open incidents are changes, too.
        """
        was_triggered = self.trigger.is_due
        self._evaluated_at_ns = at_ns
        self.rows.fold()
        n = self.rows.n
        burst = float(_BURST * (n + _FIXED_ROWS))
        self._allowance = min(self._allowance, burst) - (0 if is_last else n + _FIXED_ROWS)
        self._n_since, self.n_evaluations = 0, self.n_evaluations + 1
        self.n_rows_examined += n
        usable, right = self._usable(nodes, is_last=is_last)
        if (is_common := in_common_sample(self.rows.tables["collectives"])) is not None:
            usable = usable & is_common
        trace = self.trace(nodes, at_ns, right, usable=usable)
        if not usable.any() or without_ledger.is_for(trace) or single.is_single(trace):
            return self._judge_all(trace, at_ns, is_last=is_last) if is_last or len(trace.spans) else []
        case = self._case(trace, is_numbered=right is not None)
        result = evaluate(case, self.rows.step[usable], self.history)
        self._note_state(result)
        self.rows.step[usable] = result.step_of_row
        self._noted(result)
        is_whole = is_last and not self.history.is_trimmed
        n_judged = result.examined.n_steps
        self._enough_rows = 0 if n_judged >= _JUDGED_STEPS else int(_GROWTH * n)
        changes: list[Change] = []
        # While rounds are numbered again, an open incident is neither confirmed nor closed.
        if is_whole or (n_judged >= _JUDGED_STEPS and right is not None):
            shown = candidates.of_evaluation(
                result, self.history, self.incidents, is_whole=is_whole, is_periodic=not was_triggered
            )
            shown = on_gpus.with_gpu_arrivals(trace, shown, self.incidents, result)
            changes = self._updated(
                self._explained(trace, shown), result.step, at_ns, is_whole=is_whole, is_exact=is_exact
            )
        self.trigger.reported = self._reported()
        self._trim(result, usable, max_rows)
        return changes

    def _reported(self) -> dict[ProcessKey, int]:
        """The late steps of the processes that an open incident names."""
        return {
            process: incident.reported.evidence.n_late_steps or 0
            for incident in self.incidents.open
            if incident.candidate.sort == candidates.RANK
            for process in incident.candidate.processes
        }

    def _note_state(self, result: Evaluation) -> None:
        """Keep the evidence of an evaluation, the ranks of the processes."""
        timeline = result.case.timeline
        evidence = change.with_unclear_change(result.case, of_case(result.case)[1])
        self.evidence = replace(evidence, n_steps=result.examined.n_steps)
        self.ranks |= {
            result.case.process_key(process): rank for process, rank in enumerate(timeline.rank.tolist())
        }

    def _note_communicator(self, arrived: Array) -> None:
        """Keep the largest communicator of a known identity: the smallest hash of equals."""
        comm_hash, nranks = arrived["comm_hash"], arrived["nranks"]
        known = (comm_hash != 0) & (nranks >= self._comm_size)
        if known.any():
            size = int(nranks[known].max())
            smallest = int(comm_hash[known & (nranks == size)].min())
            is_larger = size > self._comm_size or not self.comm_hash
            self.comm_hash = smallest if is_larger else min(smallest, self.comm_hash)
            self._comm_size = size

    @property
    def id(self) -> str:
        """The largest communicator, otherwise the first process."""
        return f"{self.comm_hash:016x}" if self.comm_hash else self.name.replace(" ", "/")

    def named(self, changes: list[Change]) -> list[Change]:
        """The changes with the id of the job."""
        return [replace(change, job=self.id) for change in changes]

    def state(self, nodes: Nodes, at_ns: int, *, is_over: bool = False) -> JobState:
        """The job's identity, times and answer."""
        open_ = [incident.candidate.verdict for incident in self.incidents.open]
        silent = [] if is_over else self._silent_nodes(nodes)
        answer, reasons = answered([*open_, *self.history.over], self.evidence, self.limits, silent=silent)
        last = self.trigger.last_ns()
        known = [*((process[0], ns) for process, ns in last.items()), *self._begin_ns.items()]
        if not known:  # a job without collectives
            known = [(node, ns) for node, times_ns in self._alive_ns.items() for ns in times_ns]
        times = [wall for node, ns in known if (wall := nodes.wall_at(node, ns)) is not None]
        ended = [
            wall
            for process, ns in self._ended_ns.items()
            if (wall := nodes.wall_at(process[0], ns)) is not None
        ]
        return JobState(
            id=self.id,
            members=tuple(
                Member(nodes.names[node], pid, rank if rank is not None and rank >= 0 else None)
                for node, pid in sorted(self.members)
                for rank in [self.ranks.get((node, pid))]
            ),
            begin_ns=min(times, default=None),
            last_ns=max(times, default=None),
            ended_ns=max(ended or times, default=at_ns) if is_over else None,
            answer=answer,
            evidence=self.evidence,
            reasons=reasons,
            owner=common_owner(owners_in(self.rows.tables["owners"]).values()),
        )

    def _silent_nodes(self, nodes: Nodes) -> list[Gap]:
        """The gap by nodes with running processes whose agents report nothing, while other agents do."""
        ended = self._ended(nodes)
        members = self.members - ended
        running = {node for node, _ in members}
        if not nodes.report_life(running):
            return []
        silent_ns = {
            node: ns
            for node, ns in nodes.silent_ns(running).items()
            if ns >= _SILENT_LAGS * self.retention.lag_ns
        }
        n_ranks = sum(node in silent_ns for node, _ in members)
        by_name = {nodes.names[node]: ns for node, ns in silent_ns.items()}
        return silent_nodes(by_name, n_ranks=n_ranks, n_all=len(members))

    def standstill(self, nodes: Nodes, at_ns: int, *, is_last: bool = False) -> list[Change]:
        """Check for a hang after enough time without calls."""
        last = self.trigger.last_ns()
        if not last:
            return []
        ended = self._ended(nodes)
        now_ns = self._now_ns(nodes, at_ns)
        silent = [now_ns[member[0]] - ns for member, ns in last.items() if member not in ended]
        if not is_last and (
            at_ns - self._hang_checked_at_ns < self.rows.n * _HANG_CHECK_NS
            or not self.silence.is_due(silent, has_ended_process=bool(ended), limits=self.limits)
        ):
            return self._resumed(at_ns)
        self._hang_checked_at_ns = at_ns
        if any(incident.candidate.sort.startswith("mismatch") for incident in self.incidents.open):
            return []
        self.rows.fold()
        right = None if is_last else self.numbering.corrected(self.rows.tables["collectives"])
        trace = self.trace(nodes, at_ns, right)
        if without_ledger.is_for(trace):
            return []
        case = self._case(trace, is_numbered=right is not None)
        self.silence.patience_ns = job_patience_ns(case)
        if claims := claimed_rank.verdicts(case):
            shown = self._explained(trace, [candidates.claimed(verdict) for verdict in claims])
            return self.incidents.open_or_update(shown, self.history.next_step, at_ns, job=self.name)
        if mismatches := mismatch.verdicts(case, mismatch_findings(case)):
            shown = self._explained(trace, [candidates.mismatched(worded(verdict)) for verdict in mismatches])
            return self.incidents.open_or_update(shown, self.history.next_step, at_ns, job=self.name)
        self.n_evaluations, self.n_rows_examined = self.n_evaluations + 1, self.n_rows_examined + self.rows.n
        verdicts = hangs(case)
        if not nodes.report_life({node for node, _ in self.members}):
            verdicts = [worded(inconclusive.silent(verdict)) for verdict in verdicts]
        self._n_at_hang = self._n_arrived if verdicts else self._n_at_hang
        return self._report_verdicts(trace, candidates.HANG, verdicts, at_ns)

    def failed(self, nodes: Nodes, at_ns: int, *, is_last: bool = False) -> list[Change]:
        """Report failed CUDA calls, once each is known to end its process."""
        failed_calls = self.failed_calls
        is_due = failed_calls.is_due(
            lambda node: nodes.now_ns(node, at_ns), self._ended(nodes), is_last=is_last
        )
        has_continued = bool(failed_calls.reported) and failed_calls.has_continued(self.trigger.last_ns())
        if is_last:
            return self._failures_at_end(nodes, at_ns)
        if not (is_due or has_continued):
            return []
        self.rows.fold()
        trace = self.trace(nodes, at_ns)
        trace = replace(trace, calls=failed_calls.judged(trace.calls))
        verdicts = with_failures(trace, Report("", {}, [])).verdicts
        if has_continued and not verdicts:
            return self.incidents.end(at_ns, "the process continued", self._close, sort=candidates.FAILED)
        return self._report_verdicts(trace, candidates.FAILED, verdicts, at_ns)

    def _failures_at_end(self, nodes: Nodes, at_ns: int) -> list[Change]:
        """Report the failure of a job that has ended: failed calls, or the rank that failed first."""
        self.rows.fold()
        trace = self.trace(nodes, at_ns)
        known = [
            incident.candidate.verdict
            for incident in self.incidents.open
            if incident.candidate.sort == candidates.HANG
        ]
        verdicts = with_deaths(trace, with_failures(trace, Report("", {}, known))).verdicts
        failures = [verdict for verdict in verdicts if verdict.kind == "failure"]
        return self._report_verdicts(trace, candidates.FAILED, failures, at_ns)

    def _report_verdicts(self, trace: Trace, sort: str, verdicts: list[Verdict], at_ns: int) -> list[Change]:
        """Report verdicts of a sort that does not depend on steps."""
        shown = [Candidate(sort, frozenset(), worded(verdict), -1, 0) for verdict in verdicts]
        return self.incidents.open_or_update(
            self._explained(trace, shown), self.history.next_step, at_ns, job=self.name
        )

    def _explained(self, trace: Trace, shown: list[Candidate]) -> list[Candidate]:
        """The candidates with their GPUs, processes and severity."""
        ts_ns = trace.collectives["ts_ns"]
        observed_ns = self.history.gone_ns + (float(ts_ns.max() - ts_ns.min()) if len(ts_ns) else 0.0)
        gpu_seconds = len(self.members) * observed_ns / 1e9
        return [
            replace(
                candidate,
                verdict=replace(
                    candidate.verdict, severity=severity(candidate.verdict, gpu_seconds, self.limits)
                ),
            )
            for candidate in explained(trace, shown)
        ]

    def _resumed(self, at_ns: int) -> list[Change]:
        """Close a hang whose ranks continue."""
        if self.silence.n_silent or self._n_arrived == self._n_at_hang:
            return []
        return self.incidents.end(at_ns, "the ranks continue", self._close, sort=candidates.HANG)

    def _now_ns(self, nodes: Nodes, at_ns: int) -> dict[int, int]:
        """The time on the clock of each of the job's nodes.

        If a node of the job reports running processes, all nodes are expected to, and silence proves nothing.
        """
        own_nodes = {node for node, _ in self.members}
        if nodes.report_life(own_nodes):
            return {node: nodes.latest_ns(node) for node in own_nodes}
        return {node: nodes.now_ns(node, at_ns) for node in own_nodes}

    def trace(
        self, nodes: Nodes, at_ns: int, right: Array | None = None, *, usable: Array | None = None
    ) -> Trace:
        """The remaining rows as a trace. right: collectives with corrected rounds. usable: the rows to include."""
        tables: dict[str, Any] = dict(self.rows.tables)
        if right is not None:
            tables["collectives"] = right
        if usable is not None and not usable.all():
            tables["collectives"] = chosen(tables["collectives"], usable)
        own_nodes = {member[0] for member in self.members}
        tables |= self.drivers.of(own_nodes)
        now_ns = self._now_ns(nodes, at_ns)
        return Trace(
            **tables,
            nodes=nodes.names,
            symbols=self.symbols,
            clocks=nodes.clocks(own_nodes),
            probed=nodes.probed(own_nodes),
            lost=dict(self.lost),
            ends_ns=tuple(now_ns.get(node, UNKNOWN) for node in range(len(nodes.names))),
            source=self.source,
        )

    def _usable(self, nodes: Nodes, *, is_last: bool) -> tuple[Array, Array | None]:
        """Which collectives to evaluate, and all of them with corrected rounds; None where these must be recomputed."""
        rows = self.rows.tables["collectives"]
        right = None if is_last and has_late_ranks(rows) else self.numbering.corrected(rows)
        if is_last:
            return np.ones(len(rows), bool), right
        if right is not None:
            return complete(right, self.retention.lag_ns), right
        wall_ns = nodes.wall_ns(rows)
        if wall_ns is None:
            return np.ones(len(rows), bool), right
        return covered_by_all(rows, wall_ns, self.retention.lag_ns), right

    def _case(self, trace: Trace, *, is_numbered: bool = False) -> Case:
        """The case of the remaining rows. is_numbered: the rounds of ranks that were attached late are corrected."""
        case = case_of(trace, self.limits, self.usd_per_gpu_hour, is_numbered=is_numbered)
        if not is_numbered:
            self.numbering.note(trace.collectives, case.timeline.rows)
        return case

    def report(self, nodes: Nodes, at_ns: int) -> Report:
        """The report on the job, from its history and its rows."""
        self.rows.fold()
        trace = self.trace(nodes, at_ns)
        if not self.history.is_trimmed or without_ledger.is_for(trace):
            return engine.diagnose(trace, self.limits, usd_per_gpu_hour=self.usd_per_gpu_hour)
        result = evaluate(self._case(trace), self.rows.step, self.history)
        verdicts = candidates.report(
            result, self.history, self.incidents, standstill=hang.verdicts(result.case)
        )
        counts, evidence = of_case(result.case)
        evidence = change.with_unclear_change(result.case, evidence)
        whole = {
            "n_rounds": sum(result.examined.n_rounds.values()),
            "n_steps": result.examined.n_steps,
            "seconds": round(result.examined.observed_ns / 1e9, 3),
        }
        partial = Report(
            source=self.source,
            examined=counts | whole,
            verdicts=verdicts,
            evidence=replace(evidence, n_steps=result.examined.n_steps),
            budget=budget_of_case(result.case),
        )
        return engine.completed(trace, partial, self.limits)

    def has_ended(self, nodes: Nodes) -> bool:
        """Whether all its processes have ended before the latest events of their nodes."""
        return bool(self.members) and self._ended(nodes) >= self.members

    def end(self, at_ns: int, reason: str) -> list[Change]:
        """Close all incidents."""
        return self.incidents.end(at_ns, reason, self._close)

    def _note_ends(self, processes: Array) -> None:
        known = processes[processes["rank"] != UNKNOWN]
        self.ranks |= {(node, pid): rank for node, pid, rank in known[["node", "pid", "rank"]].tolist()}
        for node, pid, ended_ns in processes[["node", "pid", "ended_ns"]].tolist():
            if ended_ns != UNKNOWN:
                self._ended_ns[node, pid] = ended_ns

    def _note_life(self, node: int, ns: int) -> None:
        """A time at which a process of the job is alive, by the clock of its machine."""
        first_ns, last_ns = self._alive_ns.get(node, (ns, ns))
        self._alive_ns[node] = min(first_ns, ns), max(last_ns, ns)

    def _ended(self, nodes: Nodes) -> set[ProcessKey]:
        return {
            member for member, ended_ns in self._ended_ns.items() if ended_ns <= nodes.latest_ns(member[0])
        }

    def _noted(self, result: Evaluation) -> None:
        """Update the state that the trigger and the next evaluation depend on."""
        case, history = result.case, self.history
        timeline = case.timeline
        for process, newest_ns in enumerate(timeline.ts_ns[timeline.first[1:] - 1].tolist()):
            self._newest_ns[case.process_key(process)] = newest_ns
        history.next_step = result.step + 1
        n_steps = len(np.unique(result.step_of_row))
        self._rows_a_step = len(timeline.rows) / max(n_steps, 1)
        self.silence.patience_ns = job_patience_ns(case)
        self.trigger.evaluated(step_ns=case.step_ns, min_ns=self.limits.source_share * case.pace.min_ns)

    def _judge_all(self, trace: Trace, at_ns: int, *, is_last: bool) -> list[Change]:
        """The changes for a source without a time ledger: all remaining rows are judged."""
        verdicts = engine.diagnose(trace, self.limits, usd_per_gpu_hour=self.usd_per_gpu_hour).verdicts
        shown = [
            Candidate(f"{verdict.kind} {verdict.ranks}", frozenset(), verdict, -1, 0, 0)
            for verdict in verdicts
        ]
        self.history.next_step += 1
        return self._updated(shown, self.history.next_step, at_ns, is_whole=is_last)

    def _updated(
        self, shown: list[Candidate], step: int, at_ns: int, *, is_whole: bool, is_exact: bool = False
    ) -> list[Change]:
        return self.incidents.update(
            shown,
            step=step,
            at_ns=at_ns,
            is_whole=is_whole,
            is_exact=is_exact,
            closing=self._close,
            job=self.name,
        )

    def _close(self, incident: Incident, reason: str) -> None:
        """Separate the delays of a closed incident from the delays of the next incident."""
        sort, history = incident.candidate.sort, self.history
        if sort == candidates.MOVES:
            taken = {
                member
                for other in self.incidents.open
                if other.candidate.sort == candidates.RANK
                for member in other.candidate.processes
            }
            self._end_tracks(history.late, set(self._newest_ns) - taken)
        if sort == candidates.RANK:
            self._end_tracks(history.late, set(incident.candidate.processes))
            self._end_tracks(history.device, set(incident.candidate.processes))
        history.add_over(incident.candidate.verdict)

    def _end_tracks(self, tracks: Tracks, processes: set[ProcessKey]) -> None:
        for member in processes:
            track = tracks.track(member)
            track.end()
            track.over_ns = self._newest_ns.get(member, track.over_ns)

    def note_lost(self, lost: Mapping[str, int]) -> None:
        """Count records that were lost on its nodes."""
        for kind, n in lost.items():
            self.lost[kind] = self.lost.get(kind, 0) + n

    def _trim(self, result: Evaluation, usable: Array, max_rows: int) -> None:
        """Move old late steps to the history, and drop old rows.

        The older half of the rows is dropped. Late steps in the older half of the remaining rows move to the history as
        well, so that each late step is judged with as many rows before it as after it.
        """
        kept = self.retention
        wanted = max(kept.min_rows, min(kept.max_rows, int(kept.n_steps * self._rows_a_step)))
        if self.rows.n <= min(wanted, max_rows):
            return
        case, history = result.case, self.history
        arrival = case.arrival_ns
        half, three_quarters = len(arrival) // 2, 3 * len(arrival) // 4
        ordered = np.partition(arrival, (half, three_quarters))
        cut, until = float(ordered[half]), float(ordered[three_quarters])
        if not history.is_trimmed:
            history.is_trimmed = True
            judged = result.faults.case.judged.step
            history.first_step = int(judged.min()) if len(judged) else 0
            first = np.full(len(case.timeline.comm_hash), np.iinfo(np.int64).max)
            np.minimum.at(first, case.timeline.comm, case.timeline.rows["seq"])
            for comm, seq in zip(case.timeline.comm_hash.tolist(), first.tolist(), strict=True):
                history.first_seq[comm] = min(seq, history.first_seq.get(comm, seq))
        self._settle(result, until)
        late = result.in_rows(result.late)
        history.baseline = baseline_before(case, late, cut, history.baseline)
        old = _before_step_at(case, cut)
        gone = np.zeros(len(usable), bool)
        gone[np.flatnonzero(usable)[old]] = True
        gone |= before_first_kept(process_keys(self.rows.tables["collectives"]), ~gone & usable)
        history.gone_ns += float(arrival[~old].min()) - float(arrival.min())
        self.lost = {kind: round(n * float(np.mean(~gone))) for kind, n in self.lost.items()}
        self.rows.keep(~gone, max_side_rows=max(min(wanted, max_rows), 1))

    def _settle(self, result: Evaluation, until: float) -> None:
        """Move late steps up to a time on the common clock to the history."""
        case, history = result.case, self.history
        late = [
            late_step
            for late_steps in result.live.values()
            for late_step in late_steps
            if case.arrival_ns[late_step.peak_row] <= until
        ]
        for late_step in [
            late_step for late_step in late if (late_step.process, late_step.step) in result.once
        ]:
            track = history.late.track(case.process_key(late_step.process))
            track.once = [*track.once, delays_by_process(case, [late_step])[late_step.process]][
                -_MAX_ONE_OFF_DELAYS:
            ]
        late = [late_step for late_step in late if (late_step.process, late_step.step) not in result.once]
        for is_over, is_named in product((True, False), (True, False)):
            part = [
                late_step
                for late_step in late
                if (
                    result.ts_ns(late_step) <= history.late.track(case.process_key(late_step.process)).over_ns
                )
                == is_over
                and (late_step.process in result.faults.named) == is_named
            ]
            processes = result.faults.named if is_named else {late_step.process for late_step in part}
            for process, delays in measured(result, part, result.late_of(processes)).items():
                history.late.track(case.process_key(process)).add(delays, is_over=is_over)
        for process, late_steps in result.device.items():
            track = history.device.track(case.process_key(process))
            old = [late_step for late_step in late_steps if case.arrival_ns[late_step.peak_row] <= until]
            for is_over in (True, False):
                part = [
                    late_step for late_step in old if (result.ts_ns(late_step) <= track.over_ns) == is_over
                ]
                if part:
                    track.add(measured_device(result, process, part), is_over=is_over)
        for process, ts in _latest_before(
            case.timeline.process, case.arrival_ns, until, case.timeline.rows["ts_ns"]
        ):
            history.settled_ns[case.process_key(process)] = ts


def _newest_half(rows: Array) -> Array:
    """The newer half of the rows of each process: bool (n,). rows: COLLECTIVES sorted by node, pid, time."""
    keys = process_keys(rows)
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    sizes = np.diff(first, append=len(rows))
    newest: Array = np.arange(len(rows)) >= np.repeat(first + -(-sizes // 2), sizes)
    return newest


def _before_step_at(case: Case, cut: float) -> Array:
    """Rows before the step that is running at a time on the common clock, in each program: bool (n,)."""
    step, program = case.programs.step, case.programs.program[case.timeline.process]
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
