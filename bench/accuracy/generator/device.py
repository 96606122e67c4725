"""Kernels and collectives on the streams of GPUs: when each begins and ends.

A stream executes its work in order. A collective begins when the kernels of all its members have reached the front
of their streams, and ends for all members together. Work is resolved as soon as everything before it is resolved.
"""

from collections.abc import Iterable


class Work:
    """One kernel group, or one member's part of a collective. end_ns is None until it is known."""

    __slots__ = (
        "begin_ns", "bound_ns", "duration_ns", "end_ns", "floor_ns", "meeting", "n_missing", "next", "waiting",
    )  # fmt: skip

    def __init__(
        self, bound_ns: int, duration_ns: int, floor_ns: int, meeting: "Meeting | None" = None
    ) -> None:
        """bound_ns: earliest begin; floor_ns: earliest end; meeting: the collective that it is a part of."""
        self.bound_ns, self.duration_ns, self.floor_ns = bound_ns, duration_ns, floor_ns
        self.begin_ns = 0
        self.end_ns: int | None = None
        self.meeting = meeting
        self.n_missing = 0
        self.next: list[Work] = []
        self.waiting: list[int] = []


class Meeting:
    """One round of a collective. root: the index of a broadcast's root, which does not wait; -1 for all others."""

    __slots__ = ("duration_ns", "members", "n_members", "root", "start_ns")

    def __init__(self, n_members: int, root: int = -1) -> None:
        self.n_members, self.root = n_members, root
        self.members: list[Work] = []
        self.start_ns = self.duration_ns = 0


class Device:
    """The GPUs of a job. ready: the hosts whose wait has ended, to be continued by the machine."""

    def __init__(self) -> None:
        self.ready: list[int] = []

    def enqueue(self, work: Work, after: Iterable[Work | None]) -> None:
        """Put work behind other work; it is resolved at once where that is possible."""
        for before in after:
            if before is None:
                continue
            if before.end_ns is None:
                before.next.append(work)
                work.n_missing += 1
            elif before.end_ns > work.bound_ns:
                work.bound_ns = before.end_ns
        if work.n_missing == 0:
            self._settle([work])

    def _settle(self, todo: list[Work]) -> None:
        """Resolve work that depends on nothing unresolved, and everything that follows from it."""
        while todo:
            work = todo.pop()
            meeting = work.meeting
            if meeting is None:
                work.begin_ns = work.bound_ns
                self._end(work, work.bound_ns + work.duration_ns, todo)
                continue
            meeting.members.append(work)
            work.begin_ns = work.bound_ns
            meeting.start_ns = max(meeting.start_ns, work.bound_ns)
            meeting.duration_ns = max(meeting.duration_ns, work.duration_ns)
            if len(meeting.members) == meeting.n_members:
                for member in meeting.members:
                    self._end(member, meeting.start_ns + meeting.duration_ns, todo)

    def _end(self, work: Work, at_ns: int, todo: list[Work]) -> None:
        work.end_ns = end_ns = max(at_ns, work.floor_ns)
        for follower in work.next:
            follower.bound_ns = max(follower.bound_ns, end_ns)
            follower.n_missing -= 1
            if follower.n_missing == 0:
                todo.append(follower)
        if work.waiting:
            self.ready.extend(work.waiting)
        work.next, work.waiting = [], []
