"""Verdicts over time: an incident opens, is updated while it grows, and closes with a reason."""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.stream.job_members import ProcessKey

_GROWN = 1.05  # growth of the delays or the cost that leads to an update
_GROWN_EXACTLY = 1.001  # the same once no further rows arrive
NO_MORE_EVENTS = "the job sent no more events"
EVENTS_ENDED = "the events have ended"
TRACE_ENDED = "the trace has ended"
_UNOBSERVED = frozenset({NO_MORE_EVENTS, EVENTS_ENDED, TRACE_ENDED})
UNCERTAIN = "uncertain"
"""The sort of late steps that may be a coincidence: reported only while no other verdict explains them."""

_ON_LATE_STEPS = frozenset({"straggler", "device", "imbalance"})
"""Kinds of verdicts that explain late steps."""

_MAX_CLOSED = 256  # ids of closed incidents that are kept: none of these incidents opens again


@dataclass(frozen=True)
class Change:
    """A change of an incident.

    at_ns: by the stream's clock. reason: why it closed, for people. job: the id of its job, see job_state.
    """

    kind: Literal["opened", "updated", "closed"]
    incident_id: str
    verdict: Verdict
    at_ns: int
    reason: str = ""
    job: str = ""

    @property
    def state(self) -> Literal["open", "closed"]:
        return "closed" if self.kind == "closed" else "open"

    @property
    def is_resolved(self) -> bool:
        """Whether the fault is over. An incident also closes when the data ends; the fault may then continue."""
        return self.kind == "closed" and self.reason not in _UNOBSERVED


@dataclass(frozen=True)
class Candidate:
    """A candidate verdict of one evaluation.

    sort: candidates of one sort can belong to the same incident. processes: empty for a verdict on no process.
    last_step: its last late step, -1 where it lasts until it is missing. quiet_steps: the incident closes after this
    many steps without the candidate. confirm_steps: it opens if the candidate is still there this many steps later;
    0: at once.
    """

    sort: str
    processes: frozenset[ProcessKey]
    verdict: Verdict
    last_step: int
    quiet_steps: int
    confirm_steps: int = 0


@dataclass
class Incident:
    """An open incident. seen_step: newest step of the last evaluation with its candidate. reported: last verdict.

    confirmed_ns: time of that evaluation, by the stream's clock.
    """

    id: str
    candidate: Candidate
    reported: Verdict
    seen_step: int
    confirmed_ns: int = 0


@dataclass
class Incidents:
    """The incidents of one job."""

    open: list[Incident] = field(default_factory=list)
    _over: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_CLOSED))
    _waiting: dict[tuple[str, frozenset[ProcessKey]], int] = field(default_factory=dict)

    def of(self, sort: str, processes: frozenset[ProcessKey]) -> Incident | None:
        """The open incident of a candidate: the incident with most common processes, otherwise the oldest."""
        same = [incident for incident in self.open if incident.candidate.sort == sort]
        if processes:
            same = [incident for incident in same if incident.candidate.processes & processes]
        return max(same, key=lambda incident: len(incident.candidate.processes & processes), default=None)

    def update(
        self,
        candidates: list[Candidate],
        *,
        step: int,
        at_ns: int,
        is_whole: bool,
        closing: Callable[[Incident, str], None],
        job: str,
        is_exact: bool = False,
    ) -> list[Change]:
        """The changes by an evaluation.

        step: its newest step. closing: called with each incident that closes. is_exact: report small changes as well.
        """
        waiting: dict[tuple[str, frozenset[ProcessKey]], int] = {}
        ready = []
        for candidate in candidates:
            first = self._waiting.get((candidate.sort, candidate.processes), step)
            if (
                self.of(candidate.sort, candidate.processes) is None
                and not is_whole
                and step - first < candidate.confirm_steps
            ):
                waiting[candidate.sort, candidate.processes] = first
            else:
                ready.append(candidate)
        self._waiting = waiting
        opened = self.open_or_update(ready, step, at_ns, job=job, is_exact=is_exact)
        return [*opened, *self._close_quiet(step, at_ns, closing)]

    def open_or_update(
        self, candidates: list[Candidate], step: int, at_ns: int, *, job: str, is_exact: bool = False
    ) -> list[Change]:
        """The changes by confirmed candidates: incidents that open or are updated."""
        grown = _GROWN_EXACTLY if is_exact else _GROWN
        changes = []
        for candidate in candidates:
            known = self.of(candidate.sort, candidate.processes) or self._explained(candidate)
            if known is None:
                known = Incident(_id(job, candidate), candidate, candidate.verdict, step)
                if known.id in self._over:
                    continue
                self.open.append(known)
                changes.append(Change("opened", known.id, candidate.verdict, at_ns))
            elif _is_news(known.reported, candidate.verdict, grown):
                known.reported = candidate.verdict
                changes.append(Change("updated", known.id, candidate.verdict, at_ns))
            known.candidate, known.seen_step, known.confirmed_ns = candidate, step, at_ns
            changes += self._absorbed(known, candidates, at_ns)
        return changes

    def _explained(self, candidate: Candidate) -> Incident | None:
        """The open incident of uncertain late steps, if the candidate is a verdict on the lateness of these ranks.

        A verdict on other ranks, or a verdict that does not depend on steps, is a separate incident.
        """
        verdict = candidate.verdict
        if verdict.kind not in _ON_LATE_STEPS or not candidate.quiet_steps:
            return None
        return next(
            (
                incident
                for incident in self.open
                if incident.candidate.sort == UNCERTAIN
                and not _late_ranks(verdict).isdisjoint(incident.candidate.verdict.evidence.suspects or ())
            ),
            None,
        )

    def end(
        self, at_ns: int, reason: str, closing: Callable[[Incident, str], None], *, sort: str | None = None
    ) -> list[Change]:
        """Close all open incidents, or the open incidents of one sort."""
        ending = [incident for incident in self.open if sort in (None, incident.candidate.sort)]
        return [self._closed(incident, at_ns, reason, closing) for incident in ending]

    def _absorbed(self, known: Incident, candidates: list[Candidate], at_ns: int) -> list[Change]:
        """Close incidents that are now part of a larger incident: of a group of ranks, or of a delay that recurred."""
        sort, processes, still = (
            known.candidate.sort,
            known.candidate.processes,
            {incident.sort for incident in candidates},
        )
        if not processes or sort.startswith("once"):
            return []
        parts = [
            incident
            for incident in self.open
            if incident is not known
            and incident.candidate.processes
            and incident.candidate.processes <= processes
            and (
                incident.candidate.sort == sort
                or (incident.candidate.sort.startswith("once") and incident.candidate.sort not in still)
            )
        ]
        for incident in parts:
            self.open.remove(incident)
            self._over.append(incident.id)
        return [
            Change("closed", incident.id, incident.candidate.verdict, at_ns, f"part of incident {known.id}")
            for incident in parts
        ]

    def _close_quiet(self, step: int, at_ns: int, closing: Callable[[Incident, str], None]) -> list[Change]:
        changes = []
        for incident in list(self.open):
            last = incident.candidate.last_step if incident.candidate.last_step >= 0 else incident.seen_step
            quiet = incident.candidate.quiet_steps
            if quiet and step - last >= quiet:
                was = "on time" if incident.candidate.last_step >= 0 else "not seen again"
                changes.append(self._closed(incident, at_ns, f"{was} for {step - last} steps", closing))
        return changes

    def _closed(
        self, incident: Incident, at_ns: int, reason: str, closing: Callable[[Incident, str], None]
    ) -> Change:
        self.open.remove(incident)
        self._over.append(incident.id)
        closing(incident, reason)
        return Change("closed", incident.id, incident.candidate.verdict, at_ns, reason)


def worded(verdict: Verdict) -> Verdict:
    """The verdict with its summary in words."""
    return replace(verdict, summary=text.summary(verdict))


def _late_ranks(verdict: Verdict) -> set[int]:
    """The ranks whose lateness a verdict explains."""
    evidence = verdict.evidence
    return {*verdict.ranks, *(evidence.more_work or ()), *map(int, evidence.late_steps_by_rank or ())}


def _is_news(reported: Verdict, now: Verdict, grown: float) -> bool:
    """Whether a verdict differs enough from the reported verdict for an update. grown: of its delays or its cost."""
    if (reported.kind, reported.ranks, reported.period_steps) != (now.kind, now.ranks, now.period_steps):
        return True
    if (reported.severity, reported.victims, reported.owner) != (now.severity, now.victims, now.owner):
        return True
    if [part.cause.name for part in reported.causes] != [part.cause.name for part in now.causes]:
        return True
    if now.n_late_rounds > grown * reported.n_late_rounds:
        return True
    if reported.cost is None or now.cost is None:
        return reported.cost is not now.cost
    before, after = reported.cost.may_be_gpu_seconds, now.cost.may_be_gpu_seconds
    return after > grown * before or before > grown * after


def _id(job: str, candidate: Candidate) -> str:
    """The id of an incident: equal whenever the same stream is read again."""
    verdict = candidate.verdict
    key = (
        job,
        candidate.sort,
        verdict.nodes,
        verdict.ranks,
        verdict.comm_hash,
        verdict.since_ns,
        verdict.first_round,
    )
    return hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
