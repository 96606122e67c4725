"""Verdicts over time: an incident opens, is updated while it grows, and closes with a reason."""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.stream.job_members import Who

_GROWN = 1.2  # growth of the delays or the cost that leads to an update
_MOST_OVER = 256  # ids of closed incidents that are kept: none of these incidents opens again


@dataclass(frozen=True)
class Change:
    """A change of an incident. at_ns: by the stream's clock. reason: why it closed, for people."""

    kind: Literal["opened", "updated", "closed"]
    incident_id: str
    verdict: Verdict
    at_ns: int
    reason: str = ""

    @property
    def state(self) -> Literal["open", "closed"]:
        return "closed" if self.kind == "closed" else "open"


@dataclass(frozen=True)
class Sighted:
    """A candidate verdict of one evaluation.

    sort: candidates of one sort can belong to the same incident. who: its processes, empty for a verdict on no process.
    last_step: its last late step, -1 where it lasts until it is missing. quiet_steps: the incident closes after this
    many steps without the candidate. confirm_steps: it opens if the candidate is still there this many steps later;
    0: at once.
    """

    sort: str
    who: frozenset[Who]
    verdict: Verdict
    last_step: int
    quiet_steps: int
    confirm_steps: int = 0


@dataclass
class Incident:
    """An open incident. seen_step: newest step of the last evaluation with its candidate. told: the reported verdict."""

    id: str
    sighted: Sighted
    told: Verdict
    seen_step: int


@dataclass
class Incidents:
    """The incidents of one job."""

    open: list[Incident] = field(default_factory=list)
    _over: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_OVER))
    _waiting: dict[tuple[str, frozenset[Who]], int] = field(default_factory=dict)

    def of(self, sort: str, who: frozenset[Who]) -> Incident | None:
        """The open incident of a candidate: the incident with most common processes, otherwise the oldest."""
        same = [one for one in self.open if one.sighted.sort == sort]
        if who:
            same = [one for one in same if one.sighted.who & who]
        return max(same, key=lambda one: len(one.sighted.who & who), default=None)

    def seen(
        self,
        sighted: list[Sighted],
        *,
        step: int,
        at_ns: int,
        is_whole: bool,
        closing: Callable[[Incident, str], None],
        job: str,
    ) -> list[Change]:
        """The changes by an evaluation. step: its newest step. closing: called with each incident that closes."""
        waiting: dict[tuple[str, frozenset[Who]], int] = {}
        ready = []
        for one in sighted:
            first = self._waiting.get((one.sort, one.who), step)
            if self.of(one.sort, one.who) is None and not is_whole and step - first < one.confirm_steps:
                waiting[one.sort, one.who] = first
            else:
                ready.append(one)
        self._waiting = waiting
        return [*self.tell(ready, step, at_ns, job=job), *self._gone(step, at_ns, closing)]

    def tell(self, sighted: list[Sighted], step: int, at_ns: int, *, job: str) -> list[Change]:
        """The changes by confirmed candidates: incidents that open or are updated."""
        changes = []
        for one in sighted:
            known = self.of(one.sort, one.who)
            if known is None:
                known = Incident(_id(job, one), one, one.verdict, step)
                if known.id in self._over:
                    continue
                self.open.append(known)
                changes.append(Change("opened", known.id, one.verdict, at_ns))
            elif _is_news(known.told, one.verdict):
                known.told = one.verdict
                changes.append(Change("updated", known.id, one.verdict, at_ns))
            known.sighted, known.seen_step = one, step
            changes += self._absorbed(known, sighted, at_ns)
        return changes

    def end(
        self, at_ns: int, reason: str, closing: Callable[[Incident, str], None], *, sort: str | None = None
    ) -> list[Change]:
        """Close all open incidents, or the open incidents of one sort."""
        ending = [one for one in self.open if sort in (None, one.sighted.sort)]
        return [self._closed(one, at_ns, reason, closing) for one in ending]

    def _absorbed(self, known: Incident, sighted: list[Sighted], at_ns: int) -> list[Change]:
        """Close incidents that are now part of a larger incident: of a group of ranks, or of a delay that recurred."""
        sort, who, still = known.sighted.sort, known.sighted.who, {one.sort for one in sighted}
        if not who or sort.startswith("once"):
            return []
        parts = [
            one
            for one in self.open
            if one is not known
            and one.sighted.who
            and one.sighted.who <= who
            and (
                one.sighted.sort == sort
                or (one.sighted.sort.startswith("once") and one.sighted.sort not in still)
            )
        ]
        for one in parts:
            self.open.remove(one)
            self._over.append(one.id)
        return [
            Change("closed", one.id, one.sighted.verdict, at_ns, f"part of incident {known.id}")
            for one in parts
        ]

    def _gone(self, step: int, at_ns: int, closing: Callable[[Incident, str], None]) -> list[Change]:
        changes = []
        for one in list(self.open):
            last = one.sighted.last_step if one.sighted.last_step >= 0 else one.seen_step
            quiet = one.sighted.quiet_steps
            if quiet and step - last >= quiet:
                was = "on time" if one.sighted.last_step >= 0 else "not seen again"
                changes.append(self._closed(one, at_ns, f"{was} for {step - last} steps", closing))
        return changes

    def _closed(
        self, one: Incident, at_ns: int, reason: str, closing: Callable[[Incident, str], None]
    ) -> Change:
        self.open.remove(one)
        self._over.append(one.id)
        closing(one, reason)
        return Change("closed", one.id, one.sighted.verdict, at_ns, reason)


def worded(verdict: Verdict) -> Verdict:
    """The verdict with its summary in words."""
    return replace(verdict, summary=text.summary(verdict))


def _is_news(told: Verdict, now: Verdict) -> bool:
    """Whether a verdict differs enough from the reported verdict for an update."""
    if (told.kind, told.ranks, told.period_steps) != (now.kind, now.ranks, now.period_steps):
        return True
    if [part.cause.name for part in told.causes] != [part.cause.name for part in now.causes]:
        return True
    if now.n_late_rounds > _GROWN * told.n_late_rounds:
        return True
    return bool(
        told.cost and now.cost and now.cost.may_be_gpu_seconds > _GROWN * told.cost.may_be_gpu_seconds
    )


def _id(job: str, one: Sighted) -> str:
    """The id of an incident: equal whenever the same stream is read again."""
    verdict = one.verdict
    key = (job, one.sort, verdict.nodes, verdict.ranks, verdict.comm_hash, verdict.since_ns, verdict.first_round)
    return hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
