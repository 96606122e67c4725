"""CPU quotas of control groups, v1 and v2: how often and how long the processes of a group were throttled.

The kernel counts for each group; a process is also throttled when a parent group has used up its quota. So the group of
each traced process and all its parents are read, about once a second: two small files where there is a quota. The mount
table is read again from time to time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.process.process_identity import small_file

_TIME_UNITS = {"throttled_usec": 1000, "throttled_time": 1}
"""Fields of v2 and v1, and their unit in ns: Documentation/admin-guide/cgroup-v2.rst, scheduler/sched-bwc.rst."""

_ROOTS_EVERY_NS = 30 * 10**9
_MAX_PATHS = 4096

Roots = list[tuple[str, Path, bool]]
"""Hierarchies that may hold a CPU quota: the mounted part of the hierarchy, its mount point, whether it is v2."""


class Group(NamedTuple):
    """A control group. path: its folder. root: the mount point of its hierarchy."""

    path: Path
    root: Path
    is_v2: bool

    @property
    def name(self) -> str:
        """Its path in its hierarchy."""
        return "/" + "/".join(self.path.relative_to(self.root).parts)


class Throttling(NamedTuple):
    """A group was throttled between two readings. n: periods; ns: sum over the CPUs. quota: kernel text."""

    since_ns: int
    group: Group
    n: int
    ns: int
    quota: str
    pids: tuple[int, ...]


class _Counters(NamedTuple):
    at_ns: int
    n: int
    ns: int


@dataclass
class ControlGroups:
    """The groups of the traced processes. proc: where /proc is mounted."""

    proc: Path = Path("/proc")
    _last: dict[Path, _Counters] = field(default_factory=dict)
    _roots: Roots = field(default_factory=list)
    _next_roots_ns: int = 0
    _groups_of: dict[str, list[Group]] = field(default_factory=dict)

    def new_throttling(self, pids: Iterable[int], now_ns: int) -> list[Throttling]:
        """The throttling of each group since the last reading; of a new group, since its first reading."""
        if now_ns >= self._next_roots_ns:
            self._next_roots_ns = now_ns + _ROOTS_EVERY_NS
            self._roots = _roots(f"{self.proc}/self/mountinfo")
            self._groups_of.clear()
        members: dict[Group, list[int]] = {}
        for pid in pids:
            for group in self._groups(pid):
                members.setdefault(group, []).append(pid)
        throttling, counters_of = [], {}
        for group, member_pids in members.items():
            quota = _quota(group)
            counters = _counters(f"{group.path}/cpu.stat", now_ns) if quota else None
            if counters is None:
                continue
            counters_of[group.path] = counters
            before = self._last.get(group.path)
            if before and counters.n > before.n:
                n, ns = counters.n - before.n, max(counters.ns - before.ns, 0)
                throttling.append(Throttling(before.at_ns, group, n, ns, quota, tuple(member_pids)))
        self._last = counters_of
        return throttling

    def _groups(self, pid: int) -> list[Group]:
        """The group of a process in each hierarchy and all its parents except the root, which has no quota."""
        text = _text(f"{self.proc}/{pid}/cgroup")
        if text not in self._groups_of:
            if len(self._groups_of) >= _MAX_PATHS:
                self._groups_of.clear()
            self._groups_of[text] = _groups(text.splitlines(), self._roots)
        return self._groups_of[text]


def _text(path: str) -> str:
    return small_file(path).decode(errors="replace")


def _roots(mounts: str) -> Roots:
    """mounts: path of the table of mounts."""
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return []
    roots = []
    for line in lines:
        mount, _, file_system = line.partition(" - ")
        kind, _, options = [*file_system.split(), "", "", ""][:3]
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            fields = mount.split()
            roots.append((fields[3], Path(fields[4]), kind == "cgroup2"))
    return roots


def _groups(lines: list[str], roots: Roots) -> list[Group]:
    """lines: the lines of /proc/PID/cgroup, NUMBER:CONTROLLERS:PATH; v2 has the number 0 and no controllers."""
    groups = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0" and not controllers
        if not is_v2 and "cpu" not in controllers.split(","):
            continue
        for mounted, root, root_is_v2 in roots:
            inside = path.removeprefix(mounted.rstrip("/"))
            if root_is_v2 != is_v2 or ".." in Path(inside).parts or (inside == path and mounted != "/"):
                continue
            parts = Path(inside).parts[1:]
            groups += [Group(root.joinpath(*parts[:i]), root, is_v2) for i in range(len(parts), 0, -1)]
    return groups


def _quota(group: Group) -> str:
    """The quota in the kernel's words, such as "cpu.max 50000/100000"; empty where there is none."""
    try:
        if group.is_v2:
            quota, period = _text(f"{group.path}/cpu.max").split()
            return "" if quota == "max" else f"cpu.max {quota}/{period}"
        quota = _text(f"{group.path}/cpu.cfs_quota_us").strip()
        if int(quota) < 0:
            return ""
        return f"cpu.cfs_quota_us {quota}/{_text(f'{group.path}/cpu.cfs_period_us').strip()}"
    except ValueError:
        return ""


def _counters(path: str, now_ns: int) -> _Counters | None:
    try:
        stat = dict(line.split() for line in _text(path).splitlines())
        ns = next(int(stat[name]) * unit for name, unit in _TIME_UNITS.items() if name in stat)
        return _Counters(now_ns, int(stat["nr_throttled"]), ns)
    except (ValueError, KeyError, StopIteration):
        return None
