"""Verdicts over time: an incident opens, is updated while it grows, and closes with a reason. None is silently gone."""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.stream.job_members import Who

_GROWN = 1.2  # told again when its delays or its cost have grown by so much ...
_MOST_OVER = 256  # ids of incidents that are over: the same is not opened again


@dataclass(frozen=True)
class Change:
    """What happened to an incident. at_ns: by the stream's clock. reason: why it closed, for people."""

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
    """A verdict of one look. sort: what can be the same incident. who: its processes, empty where it has none.

    last_step: its last late step, -1 where it lasts as long as it is seen. quiet_steps: after so many steps without
    it, it is over. confirm_steps: it is opened when it is still seen so many steps later; 0 at once.
    """

    sort: str
    who: frozenset[Who]
    verdict: Verdict
    last_step: int
    quiet_steps: int
    confirm_steps: int = 0


@dataclass
class Incident:
    """One that is open. seen_step: the newest step of the look that saw it last."""

    id: str
    sighted: Sighted
    told: Verdict
    seen_step: int


@dataclass
class Incidents:
    """The incidents of one job. job: what its ids are made of."""

    open: list[Incident] = field(default_factory=list)
    _over: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_OVER))
    _waiting: dict[tuple[str, frozenset[Who]], int] = field(default_factory=dict)

    def of(self, sort: str, who: frozenset[Who]) -> Incident | None:
        """The open incident that a sighting belongs to: the one with most processes in common, else the oldest."""
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
        """The changes that a look brings. step: the newest step it saw. closing: told of each that ends."""
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
        """The changes by what is certain enough: incidents that open or are updated."""
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
        """Close all that are open, or those of one sort."""
        ending = [one for one in self.open if sort in (None, one.sighted.sort)]
        return [self._closed(one, at_ns, reason, closing) for one in ending]

    def _absorbed(self, known: Incident, sighted: list[Sighted], at_ns: int) -> list[Change]:
        """Ranks that were told one by one and are now told together; a delay seen once that has come again."""
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
    """Whether a verdict differs from what was told last by so much that it is told again."""
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
    """The same for the same incident, whenever the stream is read again."""
    said = one.verdict
    words = (job, one.sort, said.nodes, said.ranks, said.comm_hash, said.since_ns, said.first_round)
    return hashlib.blake2b(repr(words).encode(), digest_size=8).hexdigest()
