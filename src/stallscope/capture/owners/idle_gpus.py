"""GPUs that a job holds without using them, as rows of IDLE_GPUS.

A GPU is idle if its holder has no process that uses a GPU, or only processes without GPU calls for some minutes. Three
kinds of processes are never idle: a member of a communicator (it may wait for its peers), a process inside a call, and
a process that, with its descendants and the other processes of its job, computes or moves data.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
"""GPUs without a process are listed after this time; a job that starts is at work on the CPU."""
NO_PROCESS, NO_CALLS = "no process uses it", "no GPU call"


@dataclass(frozen=True)
class GpuProcess:
    """A traced process. used_ns: time of its last GPU call, 0 for none. gpu: number of its only GPU; empty, unknown."""

    pid: int
    labels: Mapping[str, str]
    used_ns: int
    gpu: str = ""
    is_in_communicator: bool = False


@dataclass
class _Measured:
    """cpu_ns, n_bytes: of a holder's processes. busy_ns: time of the last measurement that showed work."""

    at_ns: int
    cpu_ns: int
    n_bytes: int
    busy_ns: int


@dataclass(frozen=True)
class _Idle:
    since_ns: int
    reason: str
    pid: int
    owner: Mapping[str, str]


@dataclass
class IdleGpus:
    """used: CPU time and bytes of processes with their descendants. with_label: processes of a job.

    wall_offset_ns: wall time minus monotonic time. private: the labels that may be stored.
    """

    node: int
    after_ns: int
    used: Callable[[Iterable[int]], tuple[int, int]]
    with_label: Callable[[str, str], Sequence[int]]
    wall_offset_ns: Callable[[], int] = lambda: 0
    private: Callable[[Mapping[str, str]], dict[str, str]] = dict
    _measured: dict[tuple[str, str], _Measured] = field(default_factory=dict)
    _free_ns: dict[tuple[tuple[str, str], str], int] = field(default_factory=dict)
    _process_ns: dict[tuple[str, str], int] = field(default_factory=dict)
    _reported: dict[tuple[tuple[str, str], str], tuple[int, _Idle]] = field(default_factory=dict)

    def rows(self, now_ns: int, allocations: Sequence[Allocation], processes: Sequence[GpuProcess]) -> Array:
        """The rows to store now: GPUs that became idle, are still idle after AGAIN_NS, or are no longer idle."""
        idle: dict[tuple[tuple[str, str], str], _Idle] = {}
        held: set[int] = set()
        for allocation in allocations:
            own = [process for process in processes if _is_of(process, allocation)]
            held |= {process.pid for process in own}
            for gpu, found in self._of_allocation(allocation, own, now_ns).items():
                idle[allocation.key, gpu] = found
        for process in processes:
            if process.pid not in held and process.used_ns:
                key = ("pid", str(process.pid))
                if found_alone := self._of_processes(key, [process], process.labels, now_ns):
                    idle[key, process.gpu] = found_alone
        keys = {allocation.key for allocation in allocations}
        self._free_ns = {key: since_ns for key, since_ns in self._free_ns.items() if key[0] in keys}
        self._process_ns = {key: seen_ns for key, seen_ns in self._process_ns.items() if key in keys}
        self._measured = {
            key: value for key, value in self._measured.items() if now_ns - value.at_ns < self.after_ns
        }
        return self._changed(idle, now_ns)

    def _of_allocation(
        self, allocation: Allocation, own: Sequence[GpuProcess], now_ns: int
    ) -> dict[str, _Idle]:
        """The idle GPUs of an allocation."""
        if own:
            self._process_ns[allocation.key] = now_ns
        all_gpus = [gpu if gpu != "?" else f"?{number}" for number, gpu in enumerate(allocation.gpus)]
        found = self._of_processes(
            allocation.key, own, allocation.owner, now_ns, since_ns=allocation.since_ns
        )
        if found is not None:
            return dict.fromkeys(all_gpus, found)
        in_use = {process.gpu for process in own}
        if not own or "" in in_use or not in_use <= set(all_gpus):
            return {}
        free = {(allocation.key, gpu) for gpu in all_gpus if gpu not in in_use}
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

    def _of_processes(
        self,
        key: tuple[str, str],
        own: Sequence[GpuProcess],
        owner: Mapping[str, str],
        now_ns: int,
        *,
        since_ns: int = 0,
    ) -> _Idle | None:
        """Why and since when these processes leave the GPUs of a holder unused; None if they use them."""
        begin_ns = max(self._monotonic(since_ns), *(process.used_ns for process in own), 0)
        if not own:
            begin_ns = max(begin_ns, self._process_ns.get(key, 0))
        after_ns = self.after_ns if own else min(self.after_ns, _UNUSED_AFTER_NS)
        if now_ns - begin_ns < after_ns or any(process.is_in_communicator for process in own):
            self._measured.pop(key, None)
            return None
        busy_ns = self._busy_ns(key, own, now_ns)
        if busy_ns is None or (busy_ns and now_ns - busy_ns < self.after_ns):
            return None
        if not own:
            return _Idle(begin_ns, NO_PROCESS, 0, owner)
        return _Idle(begin_ns, NO_CALLS, own[0].pid, {**owner, **own[0].labels})

    def _busy_ns(self, key: tuple[str, str], own: Sequence[GpuProcess], now_ns: int) -> int | None:
        """When the holder's processes last worked on the CPU or moved data, 0 never; None before two measurements."""
        last = self._measured.get(key)
        if last and now_ns - last.at_ns < _MEASURED_EVERY_NS:
            return last.busy_ns if last.busy_ns >= 0 else None
        others = self.with_label(*key) if key[0] != "pid" else ()
        cpu_ns, n_bytes = self.used({*(process.pid for process in own), *others})
        if last is None:
            self._measured[key] = _Measured(now_ns, cpu_ns, n_bytes, -1)
            return None
        taken_ns = now_ns - last.at_ns
        is_busy = (
            cpu_ns - last.cpu_ns > _BUSY_CPU_SHARE * taken_ns
            or n_bytes - last.n_bytes > _BUSY_BYTES_PER_S * taken_ns / 1e9
        )
        busy_ns = now_ns if is_busy else max(last.busy_ns, 0)
        self._measured[key] = _Measured(now_ns, cpu_ns, n_bytes, busy_ns)
        return busy_ns

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


def _is_of(process: GpuProcess, allocation: Allocation) -> bool:
    label, value = allocation.key
    namespace = allocation.owner.get("namespace") if label == "pod" else None
    return process.labels.get(label) == value and namespace in (None, process.labels.get("namespace"))
