"""GPUs that a job holds without using them, as rows of IDLE_GPUS.

A GPU is idle if its holder has no process that uses a GPU, or only processes without GPU calls for some minutes. These
processes are never idle: a process inside a call; a process that, with its descendants and the other processes of its
job, computes or moves data; a process that may wait for a peer that is not here, or that is at work.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stallscope.capture.owners.proc_activity import JobProcess
from stallscope.capture.owners.source import Allocation
from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.owner import column

AGAIN_NS = 60 * 10**9
"""A row is repeated after this time, so that the end of an idle time is known where its last row is lost."""

_MEASURED_EVERY_NS = 10 * 10**9
_BUSY_CPU_SHARE = 0.03
_BUSY_BYTES_PER_S = 100_000
_UNUSED_AFTER_NS = 30 * 10**9
"""GPUs of a job without any process are listed after this time; a job with processes may be starting."""
NO_PROCESS, NO_CALLS = "no process uses it", "no GPU calls"
_KEEPERS = frozenset({"slurmstepd", "pause", "sleep", "tail"})
"""Programs that keep an allocation, a container or a step open."""
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "fish", "tmux: server", "screen", "sshd", "slurm_script"})
"""Programs that wait for a user, or for a program that they started."""


@dataclass(frozen=True)
class GpuProcess:
    """A traced process. used_ns: time of its last GPU call, 0 for none. gpus: names, see gpu_calls.py; empty, unknown.

    n_peers: processes of its group, with itself; 1 without a group.
    """

    pid: int
    labels: Mapping[str, str]
    used_ns: int
    gpus: tuple[str, ...] = ()
    n_peers: int = 1


@dataclass
class _Measured:
    """cpu_ns, n_bytes: of a holder's processes. busy_ns: time of the last measurement that showed work, 0 none.

    is_known: False before the second measurement, and while the processes may be starting or waiting for a peer.
    """

    at_ns: int
    cpu_ns: int
    n_bytes: int
    busy_ns: int = 0
    is_known: bool = False


@dataclass(frozen=True)
class _Idle:
    since_ns: int
    reason: str
    pid: int
    owner: Mapping[str, str]


@dataclass(frozen=True)
class _Holder:
    """A job, pod or process. own: its traced processes. others: all its processes on this machine."""

    key: tuple[str, str]
    owner: Mapping[str, str]
    own: Sequence[GpuProcess]
    others: Sequence[JobProcess] = ()
    since_ns: int = 0

    @property
    def may_wait_for_peers(self) -> bool:
        """Whether a process belongs to a group that is not here as a whole."""
        if self.own:
            return any(process.n_peers > len(self.own) for process in self.own)
        return any(process.has_peers for process in self.others)

    @property
    def at_work(self) -> list[JobProcess]:
        """The processes that may prepare the use of a GPU. A shell that waits for them, or for a user, does not."""
        return [
            process
            for process in self.others
            if process.comm not in _KEEPERS | _SHELLS and process.labels.get("job_step") != "extern"
        ]


@dataclass
class IdleGpus:
    """used: CPU time and bytes of processes with their descendants. with_label: processes of a job.

    wall_offset_ns: wall time minus monotonic time. private: the labels that may be stored.
    """

    node: int
    after_ns: int
    used: Callable[[Iterable[int]], tuple[int, int]]
    with_label: Callable[[str, str], Sequence[JobProcess]]
    wall_offset_ns: Callable[[], int] = lambda: 0
    private: Callable[[Mapping[str, str]], dict[str, str]] = dict
    _measured: dict[tuple[str, str], _Measured] = field(default_factory=dict)
    _free_ns: dict[tuple[tuple[str, str], str], int] = field(default_factory=dict)
    _process_ns: dict[tuple[str, str], int] = field(default_factory=dict)
    _reported: dict[tuple[tuple[str, str], str], tuple[int, _Idle]] = field(default_factory=dict)

    def rows(
        self,
        now_ns: int,
        allocations: Sequence[Allocation],
        processes: Sequence[GpuProcess],
        *,
        number: Callable[[str], str] = str,
        occupied: Collection[str] = frozenset(),
    ) -> Array:
        """The rows to store now: GPUs that became idle, are still idle after AGAIN_NS, or are no longer idle.

        number: the name of a GPU in `processes`, from its name in `allocations`. occupied: GPUs that a process uses
        that is not in `processes`.
        """
        idle: dict[tuple[tuple[str, str], str], _Idle] = {}
        held: set[int] = set()
        for allocation in allocations:
            own = [process for process in processes if _is_of(process, allocation)]
            held |= {process.pid for process in own}
            for gpu, reason in self._of_allocation(allocation, own, now_ns, number).items():
                if number(gpu) not in occupied:
                    idle[allocation.key, gpu] = reason
        for process in processes:
            if process.pid not in held and process.used_ns:
                holder = _Holder(("pid", str(process.pid)), process.labels, [process])
                if reason_alone := self._why_idle(holder, now_ns):
                    idle |= {(holder.key, gpu): reason_alone for gpu in process.gpus or ("",)}
        keys = {allocation.key for allocation in allocations}
        self._free_ns = {key: since_ns for key, since_ns in self._free_ns.items() if key[0] in keys}
        self._process_ns = {key: last_ns for key, last_ns in self._process_ns.items() if key in keys}
        self._measured = {
            key: value for key, value in self._measured.items() if now_ns - value.at_ns < self.after_ns
        }
        return self._changed(idle, now_ns)

    def _of_allocation(
        self, allocation: Allocation, own: Sequence[GpuProcess], now_ns: int, number: Callable[[str], str]
    ) -> dict[str, _Idle]:
        """The idle GPUs of an allocation."""
        if own:
            self._process_ns[allocation.key] = now_ns
        distinct = [gpu if gpu != "?" else f"?{index}" for index, gpu in enumerate(allocation.gpus)]
        names = {number(gpu): gpu for gpu in distinct}
        holder = _Holder(allocation.key, allocation.owner, own, since_ns=allocation.since_ns)
        if reason := self._why_idle(holder, now_ns):
            return dict.fromkeys(names.values(), reason)
        in_use = {gpu for process in own for gpu in process.gpus}
        if not own or not all(process.gpus for process in own) or not in_use <= names.keys():
            return {}
        free = {(allocation.key, name) for gpu, name in names.items() if gpu not in in_use}
        self._free_ns = {
            key: since_ns
            for key, since_ns in self._free_ns.items()
            if key[0] != allocation.key or key in free
        } | dict.fromkeys(free - self._free_ns.keys(), now_ns)
        return {
            gpu: _Idle(self._free_ns[key, gpu], NO_PROCESS, 0, allocation.owner)
            for key, gpu in free
            if now_ns - self._free_ns[key, gpu] >= self.after_ns
        }

    def _why_idle(self, holder: _Holder, now_ns: int) -> _Idle | None:
        """Why and since when a holder leaves its GPUs unused; None if it uses them."""
        own, key = holder.own, holder.key
        begin_ns = max(self._monotonic(holder.since_ns), *(process.used_ns for process in own), 0)
        if not own:
            begin_ns = max(begin_ns, self._process_ns.get(key, 0))
        quiet_ns = now_ns - begin_ns
        if quiet_ns < (self.after_ns if own else min(self.after_ns, _UNUSED_AFTER_NS)):
            self._measured.pop(key, None)
            return None
        measured = self._measurement(holder, now_ns, quiet_ns)
        if not measured.is_known or (measured.busy_ns and now_ns - measured.busy_ns < self.after_ns):
            return None
        if not own:
            return _Idle(begin_ns, NO_PROCESS, 0, holder.owner)
        return _Idle(begin_ns, NO_CALLS, own[0].pid, {**holder.owner, **own[0].labels})

    def _measurement(self, holder: _Holder, now_ns: int, quiet_ns: int) -> _Measured:
        """The present measurement of a holder's processes. quiet_ns: time without a GPU call."""
        last = self._measured.get(holder.key)
        if last and now_ns - last.at_ns < _MEASURED_EVERY_NS:
            return last
        holder = replace(holder, others=self._others(holder))
        pids = {process.pid for process in holder.own} | {process.pid for process in holder.others}
        cpu_ns, n_bytes = self.used(pids)
        is_starting = not holder.own and bool(holder.at_work) and quiet_ns < self.after_ns
        present = _Measured(now_ns, cpu_ns, n_bytes)
        if last:
            present.busy_ns = now_ns if _shows_work(last, present) else last.busy_ns
            present.is_known = not is_starting and not holder.may_wait_for_peers
        self._measured[holder.key] = present
        return present

    def _others(self, holder: _Holder) -> Sequence[JobProcess]:
        if holder.key[0] == "pid":
            return ()
        pod_uid = holder.owner.get("pod_uid")
        return self.with_label("pod_uid", pod_uid) if pod_uid else self.with_label(*holder.key)

    def _monotonic(self, wall_ns: int) -> int:
        return wall_ns - self.wall_offset_ns() if wall_ns else 0

    def _changed(self, idle: Mapping[tuple[tuple[str, str], str], _Idle], now_ns: int) -> Array:
        due = [
            (key, found, 1)
            for key, found in idle.items()
            if key not in self._reported or now_ns - self._reported[key][0] >= AGAIN_NS
        ]
        over = [(key, last, 0) for key, (_, last) in self._reported.items() if key not in idle]
        self._reported = {key: value for key, value in self._reported.items() if key in idle}
        self._reported |= {key: (now_ns, found) for key, found, _ in due}
        rows = layout.empty(layout.IDLE_GPUS, len(due) + len(over))
        rows["ts_ns"], rows["node"] = now_ns, self.node
        for row, (key, found, is_idle) in zip(rows, [*due, *over], strict=True):
            row["gpu"], row["holder"] = key[1].encode(), f"{key[0][0]} {key[0][1]}".encode()
            row["is_idle"], row["since_ns"], row["pid"] = is_idle, found.since_ns, found.pid
            row["reason"] = found.reason.encode()
            for label, value in self.private(found.owner).items():
                row[column(label)] = value.encode()
        return rows


def _shows_work(last: _Measured, present: _Measured) -> bool:
    """A decrease is work that belonged to processes that have ended."""
    seconds = (present.at_ns - last.at_ns) / 1e9
    return (
        abs(present.cpu_ns - last.cpu_ns) > _BUSY_CPU_SHARE * seconds * 1e9
        or abs(present.n_bytes - last.n_bytes) > _BUSY_BYTES_PER_S * seconds
    )


def _is_of(process: GpuProcess, allocation: Allocation) -> bool:
    label, value = allocation.key
    namespace = allocation.owner.get("namespace") if label == "pod" else None
    return process.labels.get(label) == value and namespace in (None, process.labels.get("namespace"))
