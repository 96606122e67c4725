"""The statements of logs and stack dumps on the ranks of a job; see statement_trace for their trace.

Times are wall-clock times if lines carry them, otherwise the order of the lines.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Op
from stallscope.events.trace import Gap

_MAX_STACKS = 64  # threads of one rank
_MAX_FAILURES = 20_000
_MAX_RANKS = 1 << 17
_AFTER_END_NS = 60 * 10**9
_AFTER_TIMEOUT_NS = 1800 * 10**9  # the watchdog and the heartbeat monitor end the process within this time


@dataclass
class Progress:
    """Collectives of one rank in one group. open_seq: the collective that timed out; words: its operation and size."""

    group: str
    enqueued: int = UNKNOWN
    started: int = UNKNOWN
    completed: int = UNKNOWN
    open_seq: int = UNKNOWN
    op: Op = Op.NONE
    count: int = UNKNOWN
    words: str = ""
    line: str = ""
    ts_ns: int = 0

    def is_possible(self) -> bool:
        """Whether all numbers fit the tables of a trace."""
        return max(self.enqueued, self.started, self.completed, self.open_seq, self.count) < 1 << 62

    def joined(self, other: "Progress") -> "Progress":
        """The statements of two parts: the time-out of either, and the furthest counters."""
        first, second = (self, other) if self.open_seq != UNKNOWN else (other, self)
        first.enqueued, first.started = (
            max(first.enqueued, second.enqueued),
            max(first.started, second.started),
        )
        first.completed = max(first.completed, second.completed)
        first.line = first.line or second.line
        return first


@dataclass(frozen=True)
class Failure:
    """An end or error that a line states. kind: see failure_labels. status: exit status, 128 + signal; UNKNOWN."""

    rank: int
    kind: str
    words: str
    ts_ns: int
    stack: tuple[str, ...] = ()
    status: int = UNKNOWN
    pid: int = UNKNOWN
    host: str = ""


@dataclass
class Statements:
    """All statements of some files. world_size: UNKNOWN if no line states it. writers: ranks that wrote a line.

    local_ranks: the rank within a group, by group and rank.
    """

    world_size: int = UNKNOWN
    hosts: dict[int, str] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    writers: set[int] = field(default_factory=set)
    progress: dict[tuple[str, int], Progress] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    members: dict[str, set[int]] = field(default_factory=dict)
    local_ranks: dict[tuple[str, int], int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    stacks: dict[int, list[tuple[str, ...]]] = field(default_factory=dict)
    omitted: dict[str, int] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    has_times: bool = False
    started_ns: int = 0  # the start of a launcher; 0 where unknown

    def at(self, group: str, rank: int) -> Progress:
        """The progress of a rank in a group, made on first use."""
        self.members.setdefault(group, set()).add(rank)
        return self.progress.setdefault((group, rank), Progress(group))

    def omit(self, reason: str, n: int = 1) -> None:
        """Count records that were left out."""
        self.omitted[reason] = self.omitted.get(reason, 0) + n

    def add_stack(self, rank: int, frames: Iterable[str]) -> None:
        """Keep the stack of one thread, innermost frame first."""
        stacks = self.stacks.setdefault(rank, [])
        if len(stacks) < _MAX_STACKS and (stack := tuple(frames)):
            stacks.append(stack)

    def add_failure(self, failure: Failure) -> None:
        """Keep a failure, up to a limit."""
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(failure)
        else:
            self.omit("further errors in logs")

    def merge(self, other: "Statements") -> None:
        """Add the statements of another part of the same job."""
        self.world_size = max(self.world_size, other.world_size)
        self.hosts = other.hosts | self.hosts
        self.groups = other.groups | self.groups
        self.facts = other.facts | self.facts
        self.pids = other.pids | self.pids
        self.local_ranks = other.local_ranks | self.local_ranks
        self.writers |= other.writers
        for (group, rank), progress in other.progress.items():
            known = self.progress.get((group, rank))
            self.progress[group, rank] = progress if known is None else known.joined(progress)
        for group, members in other.members.items():
            self.members.setdefault(group, set()).update(members)
        for failure in other.failures:
            self.add_failure(failure)
        for rank, stacks in other.stacks.items():
            for stack in stacks:
                self.add_stack(rank, stack)
        for reason, n in other.omitted.items():
            self.omit(reason, n)
        self.gaps += other.gaps
        self.sources += other.sources
        self.has_times |= other.has_times
        self.started_ns = max(self.started_ns, other.started_ns)

    def add_silent_members(self) -> None:
        """Add the members of groups that no line states, where the stated members are evenly spaced: 4, 5, 7 of 4."""
        for group, members in self.members.items():
            local = {
                rank: self.local_ranks[group, rank] for rank in members if (group, rank) in self.local_ranks
            }
            if len(local) < 2 or len(set(local.values())) < len(local):
                continue
            (first, at), (second, then) = sorted(local.items())[:2]
            stride = (second - first) // (then - at) if then > at else 0
            size = max(local.values()) + 1
            base = first - at * stride
            if (
                stride > 0
                and base >= 0
                and all(rank == base + stride * n for rank, n in local.items())
                and size <= 4096
            ):
                members |= set(range(base, base + stride * size, stride))

    def leave_out_impossible_numbers(self) -> None:
        """Leave out ranks, process ids and rounds that no job has: damaged lines state them."""
        if self.world_size > _MAX_RANKS:
            self.world_size = UNKNOWN
        ranks = {rank for _, rank in self.progress} | set(self.stacks) | self.writers
        ranks |= {failure.rank for failure in self.failures}
        impossible = {rank for rank in ranks if rank > _MAX_RANKS}
        if impossible:
            self.omit("statements on impossible ranks", len(impossible))
        self.writers -= impossible
        self.stacks = {rank: own for rank, own in self.stacks.items() if rank not in impossible}
        self.failures = [failure for failure in self.failures if failure.rank not in impossible]
        self.progress = {
            key: p for key, p in self.progress.items() if key[1] not in impossible and p.is_possible()
        }
        for members in self.members.values():
            members -= impossible
        self.pids = {rank: pid for rank, pid in self.pids.items() if 0 <= pid < 1 << 32}

    def claims(self) -> dict[tuple[object, ...], object]:
        """Statements of which a job makes one: the process, the time-out and the last error of each rank."""
        claims: dict[tuple[object, ...], object] = {("pid", rank): pid for rank, pid in self.pids.items()}
        for (group, rank), progress in self.progress.items():
            if progress.open_seq != UNKNOWN:
                claims["time-out", group, rank] = progress.open_seq
        for failure in self.failures:
            if failure.rank != UNKNOWN and failure.stack:
                claims["error", failure.rank] = failure.words
        return claims

    def acts(self) -> Iterable[tuple[int, int]]:
        """Rank and time of the time-outs and errors that ranks state themselves."""
        yield from ((rank, progress.ts_ns) for (_, rank), progress in self.progress.items())
        yield from ((failure.rank, failure.ts_ns) for failure in self.failures if failure.stack)

    def span_ns(self) -> tuple[int, int] | None:
        """First and last time of the failures and time-outs; None without times."""
        times = [failure.ts_ns for failure in self.failures]
        times += [progress.ts_ns for progress in self.progress.values()]
        return (min(times), max(times)) if times and self.has_times else None


@dataclass
class _Attempt:
    """parts: of one attempt. claims: of all parts. last_ns: the time until which each rank may state an error."""

    parts: list[Statements] = field(default_factory=list)
    claims: dict[tuple[object, ...], object] = field(default_factory=dict)
    last_ns: dict[int, int] = field(default_factory=dict)

    def permits(self, part: Statements) -> bool:
        """Whether a part can be of this attempt: a process that ended or timed out states no error much later."""
        if any(self.claims.get(key, value) != value for key, value in part.claims().items()):
            return False
        if part.started_ns and any(
            (part_ns := known.span_ns()) and part_ns[1] < part.started_ns for known in self.parts
        ):
            return False
        return not part.has_times or all(
            ts_ns <= self.last_ns.get(rank, ts_ns) for rank, ts_ns in part.acts()
        )

    def add(self, part: Statements) -> None:
        self.parts.append(part)
        self.claims.update(part.claims())
        if not part.has_times:
            return
        for failure in part.failures:
            if failure.status != UNKNOWN and failure.rank != UNKNOWN:
                self.last_ns.setdefault(failure.rank, failure.ts_ns + _AFTER_END_NS)
        for (_, rank), progress in part.progress.items():
            self.last_ns.setdefault(rank, progress.ts_ns + _AFTER_TIMEOUT_NS)


def attempts(parts: Sequence[Statements]) -> list[list[Statements]]:
    """The parts of a log in sets of one attempt each, in their order.

    Parts with different claims on a rank are of different attempts. A part belongs to the last attempt that permits it.
    """
    out: list[_Attempt] = []
    for part in parts:
        if not out or not out[-1].permits(part):
            out.append(_Attempt())
        out[-1].add(part)
    return [attempt.parts for attempt in out]
