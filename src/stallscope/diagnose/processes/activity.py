"""The activity of each process that uses a GPU: time budget, call rates, GPU state and code locations.

Input: `snapshots` (the kernel's time ledger) and `operations` (counts of every call), which are complete, and
`samples` and the GPU driver's rows. `calls` is not read: it holds slow calls only. Seconds without any CUDA call in
which the process slept or waited count as idle. Seconds before and after its steady work count as start and end. Both
are left out of the shares. Accuracy: shares of the ledger are exact to 1 %; shares of samples have a standard error of
at most 50 points / sqrt(samples).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stallscope.diagnose.arrays.grouping import known_mean
from stallscope.diagnose.processes.code_locations import IMPORTS, matches, user_line
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import (
    LOWERED_POWER_LIMIT,
    N_CATEGORIES,
    Category,
    Direction,
    HostMemory,
    Op,
    SampleRole,
)
from stallscope.events.trace import Trace

_SILENT_NS, _SILENT_ESTIMATE_NS = 10 * 10**9, 90 * 10**9
_LISTED_EVERY_NS = 35 * 10**9
"""The interval of the rows of a process in gpu_processes, with a reserve."""
_IDLE_SHARE = 0.9
_IDLE = (Category.SLEEP, Category.NET, Category.OTHER_OFF, Category.LOCK)
_MIN_S = 0.5
_PAUSE_NS = 10**9
_HALF_SECOND_NS = 500_000_000
_ENOUGH_INTERVALS = 4
"""With this many intervals, the first interval counts as start: libraries and GPU are initialised in it."""

Z_80 = 1.28
"""Standard errors on each side of the mean that contain 80 % of a normal distribution: 10 % lie below them."""

_BUSY_SPREAD = 0.03
_ROUNDING = 0.005
"""The spread of a steady process's readings from second to second, and the rounding of the driver to per cents."""

_ENOUGH_WHOLE = 0.25
"""Readings inside the time examined that cover this share of it stand for all of it: the work is steady."""

_WHOLE = 0.9
_QUERY_NS = 10**9
"""The GPU driver is queried once a second. Its readings cover the time before the query."""

_STEADY_SHARE = 0.7
"""Of the median number of calls: seconds with fewer calls at the beginning and the end count as start and end."""

_MIN_SAMPLES = 100
"""Calls that an estimate needs: its standard error is then below 10 %."""

_TYPICAL_LAUNCH_NS = 15_000
_BLOCKED_LAUNCH_NS = 40_000
"""A launch that takes longer on average waits for room in the launch queue: the GPU is behind."""

_SYNC_COST_NS = 8_000
"""A synchronise call on an idle GPU takes this long (H200, driver 580: 5 to 10 us)."""

_GPU_OPS = (
    Op.SYNC,
    Op.COPY,
    Op.LAUNCH,
    Op.GRAPH_LAUNCH,
    Op.ALLOC,
    Op.FREE,
    Op.MEMSET,
    Op.STREAM_WAIT,
    Op.EVENT_RECORD,
)

BUDGET = {
    "on_cpu": (Category.ON_CPU,),
    "gpu_wait": (Category.DEVICE, Category.WAIT_GPU),
    "copies": (Category.COPY,),
    "allocation": (Category.ALLOC,),
    "launches": (Category.LAUNCH,),
    "locks": (Category.LOCK,),
    "child": (Category.CHILD,),
    "disk": (Category.IO,),
    "network": (Category.NET,),
    "sleep": (Category.SLEEP,),
    "preempted": (Category.PREEMPTED,),
    "stopped": (Category.STOPPED,),
    "page_faults": (Category.FAULT,),
    "driver": (Category.DRIVER,),
    "other": (Category.OTHER_OFF,),
}
"""The items of a time budget, by the ledger categories that they sum."""


@dataclass(frozen=True)
class Calls:
    """Calls of one kind: rate, time share and mean duration. is_estimate: the probes were on part of the time."""

    per_second: float = 0.0
    share: float = 0.0
    mean_us: float = 0.0
    bytes_per_call: float = 0.0
    n_seen: int = 0
    is_estimate: bool = False

    @property
    def is_supported(self) -> bool:
        """Whether the record supports a figure."""
        return self.n_seen > 0 and (not self.is_estimate or self.n_seen >= _MIN_SAMPLES)


class Silence(NamedTuple):
    """The time since the last GPU call of a process that runs. state: item of the budget. line: of its GPU thread."""

    seconds: float
    state: str
    line: str


@dataclass(frozen=True)
class Gpu:
    """The GPU of a process as its driver reports it, averaged over the time examined; None where not reported.

    busy_range: the 80 % interval of `busy`, see _busy().
    sm_active, memory_bandwidth: shares of its multiprocessors and of its memory's bandwidth in use.
    is_power_limited: its power limit is below its default. Dense work reaches the default limit, which is normal.
    """

    number: int
    name: str
    busy: float | None = None
    busy_range: tuple[float, float] = (0.0, 1.0)
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_mhz: float | None = None
    sm_max_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    is_power_limited: bool = False
    throttled: dict[str, float] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    others_busy: float = 0.0
    sm_active: float | None = None
    memory_bandwidth: float | None = None


@dataclass(frozen=True)
class Activity:
    """One process.

    libraries: communication libraries that it has loaded. budget: shares of `seconds`, which leave out idle_seconds,
    and start_seconds before and after the steady work. samples: rows of SAMPLES.
    """

    node: int
    pid: int
    rank: int
    command: str
    libraries: tuple[str, ...]
    begin_ns: int
    seconds: float
    idle_seconds: float
    start_seconds: float
    budget: dict[str, float]
    estimated_wait: float
    """Part of the share gpu_wait that is estimated: the probes on synchronise calls were off."""
    calls: dict[str, Calls]
    gpu: Gpu | None
    samples: Array
    stacks: dict[int, tuple[str, ...]]
    silence: Silence | None
    spent_ns: Array
    interval: Array
    """spent_ns: the time ledger by interval examined, float64 (k, N_CATEGORIES). interval: of each sample."""

    @property
    def gpu_busy_at_least(self) -> float:
        """Lower bound of the share in which the GPU was busy: the host's waits for it minus the cost of the calls."""
        overhead = self.calls["synchronise"].per_second * _SYNC_COST_NS / 1e9
        return max(self.budget["gpu_wait"] - min(overhead, self.budget["gpu_wait"]), 0.0)

    @property
    def gpu_busy(self) -> float | None:
        """Share in which the GPU was busy: by its driver, or by the ledger if that is enough; otherwise None."""
        if self.gpu and self.gpu.busy is not None and not self.gpu.others:
            return max(self.gpu.busy, self.gpu_busy_at_least)
        return self.gpu_busy_at_least if self.gpu_busy_at_least >= 0.9 else None

    @property
    def gpu_busy_at_most(self) -> float | None:
        """The upper end of the interval of gpu_busy; None where gpu_busy is None."""
        busy = self.gpu_busy
        if busy is None or self.gpu is None or self.gpu.busy is None or self.gpu.others:
            return busy
        return max(self.gpu.busy_range[1], busy)

    def of_role(self, role: SampleRole) -> Array:
        """The samples of one role."""
        return self.samples[self.samples["role"] == role]

    def frames(self, row: Array) -> tuple[str, ...]:
        """The stack of a sample."""
        return self.stacks.get(int(row["stack"]), ())

    @property
    def n_samples(self) -> int:
        return int(self.of_role(SampleRole.GPU)["n"].sum())


def activities(trace: Trace) -> list[Activity]:
    """The activity of every process whose GPU calls are counted, by node and pid."""
    counted = trace.operations[np.isin(trace.operations["op"], _GPU_OPS)]
    out = []
    for node, pid in np.unique(counted[["node", "pid"]]).tolist():
        of_process = counted[(counted["node"] == node) & (counted["pid"] == pid)]
        if (activity := _activity(trace, node, pid, of_process)) is not None:
            out.append(activity)
    return out


def _activity(trace: Trace, node: int, pid: int, counted: Array) -> Activity | None:
    states = trace.snapshots[(trace.snapshots["node"] == node) & (trace.snapshots["pid"] == pid)]
    states = states[np.argsort(states["ts_ns"], kind="stable")]
    if len(states) < 2:
        return None
    spent_ns = np.maximum(np.diff(states["ledger_ns"], axis=0), 0)
    begin_ns, end_ns = states["ts_ns"][:-1], states["ts_ns"][1:]
    n_calls = _n_calls(end_ns, counted)
    is_start = _is_start(n_calls)
    is_start[
        : max(_n_importing(trace, node, pid, end_ns, n_calls), int(len(is_start) >= _ENOUGH_INTERVALS))
    ] = True
    is_idle = _idle(spent_ns, n_calls) & ~is_start
    sleep_ns = spent_ns[:, Category.SLEEP - 1]
    paused_ns = np.minimum(_paused_ns(trace, node, pid, begin_ns, end_ns, sleep_ns), sleep_ns)
    spent_ns[:, Category.SLEEP - 1] -= paused_ns
    active = ~is_idle & ~is_start
    spent = spent_ns[active].sum(axis=0).astype(np.float64)
    seconds = float(spent.sum()) / 1e9
    if seconds < _MIN_S:
        return None
    since_ns = int(begin_ns[active][0])
    calls = _calls(
        _steady(counted, _within(counted["ts_ns"], end_ns, ~active), since_ns), seconds, trace.symbols
    )
    samples = trace.samples[(trace.samples["node"] == node) & (trace.samples["pid"] == pid)]
    samples = samples[_within(samples["ts_ns"], end_ns, ~active)]
    rank, command, libraries = _identity(trace, node, pid)
    return Activity(
        node=node,
        pid=pid,
        rank=rank,
        command=command,
        libraries=libraries,
        begin_ns=int(begin_ns[0]),
        seconds=seconds,
        idle_seconds=float((end_ns - begin_ns)[is_idle].sum() + paused_ns[active].sum()) / 1e9,
        start_seconds=float((end_ns - begin_ns)[is_start].sum()) / 1e9,
        budget=_budget(spent, calls),
        estimated_wait=float(np.diff(states["estimated_ns"])[active].sum() / spent.sum()),
        calls=calls,
        gpu=_gpu(trace, node, pid, begin_ns=begin_ns[active], end_ns=end_ns[active]),
        samples=samples,
        stacks=trace.stacks,
        silence=_silence(trace, states, counted),
        spent_ns=spent_ns[active].astype(np.float64),
        interval=np.cumsum(active)[np.searchsorted(end_ns, samples["ts_ns"] - _HALF_SECOND_NS)] - 1,
    )


def _n_calls(end_ns: Array, counted: Array) -> Array:
    """GPU calls in each interval between two snapshots: (n,). A count of several seconds is spread over them.

    Estimates are used only without complete counts. Where waits are sampled, the complete counts of a function that is
    sampled later end with its first period, so they are not used either.
    """
    n_calls = np.zeros(len(end_ns))
    is_estimate = counted["is_estimate"] > 0
    if (is_estimate & (counted["op"] == Op.SYNC)).any():
        is_estimate = np.isin(counted["symbol"], counted["symbol"][is_estimate])
    complete = counted[~is_estimate]
    for row in complete if complete["n"].sum() > len(end_ns) else counted:
        last = np.searchsorted(end_ns, row["ts_ns"] - _HALF_SECOND_NS)
        first = np.searchsorted(end_ns, row["ts_ns"] - row["interval_ns"] + _HALF_SECOND_NS)
        covered = slice(int(min(first, last)), int(last) + 1)
        n_calls[covered] += row["n"] / max(len(n_calls[covered]), 1)
    return n_calls


def _silence(trace: Trace, states: Array, counted: Array) -> Silence | None:
    """Of the process of these SNAPSHOTS, if it has made no GPU call for long; None if it has ended.

    Counts that are estimates come once per period, so a silence is longer than any period. A process on the CPU may
    poll the GPU by functions that are not counted.
    """
    last_ns, end_ns = int(counted["ts_ns"].max()), int(states["ts_ns"][-1])
    silent_ns = end_ns - last_ns
    limit_ns = _SILENT_ESTIMATE_NS if counted["is_estimate"].any() else _SILENT_NS
    if not states["alive"][-1] or silent_ns < max(limit_ns, 1.5 * counted["interval_ns"].max()):
        return None
    within = states[states["ts_ns"] >= last_ns]
    if len(within) < 2:
        return None
    spent = within["ledger_ns"][-1] - within["ledger_ns"][0]
    state = item_of(int(spent.argmax()) + 1)
    if state in ("on_cpu", "preempted"):
        return None
    rows = trace.samples
    rows = rows[
        (rows["node"] == states["node"][0]) & (rows["pid"] == states["pid"][0]) & (rows["ts_ns"] > last_ns)
    ]
    lines = Counter[str]()
    for row in rows[rows["role"] == SampleRole.GPU]:
        lines[user_line(trace.stacks.get(int(row["stack"]), ()))] += int(row["n"])
    line = max(lines, key=lambda name: lines[name], default="")
    return Silence(silent_ns / 1e9, state, line)


def _is_start(n_calls: Array) -> Array:
    """Whether an interval lies before or after the steady work of a process: bool (n,)."""
    some = n_calls[n_calls > 0]
    steady = (
        np.flatnonzero(n_calls >= _STEADY_SHARE * np.median(some)) if len(some) else np.array([], np.int64)
    )
    is_start = np.zeros(len(n_calls), bool)
    if len(steady) > 2:
        is_start[: steady[0]] = is_start[steady[-1] + 1 :] = True
    return is_start


def _n_importing(trace: Trace, node: int, pid: int, end_ns: Array, n_calls: Array) -> int:
    """The number of first intervals in which a process imports modules more than it does other work.

    Imports during most of the trace are part of the work if the GPU calls continue at their typical rate: a module
    that is loaded again in each step.
    """
    rows = trace.samples
    rows = rows[(rows["node"] == node) & (rows["pid"] == pid) & (rows["role"] == SampleRole.GPU)]
    excess = np.zeros(len(end_ns))
    for row in rows:
        is_import = matches(trace.stacks.get(int(row["stack"]), ()), IMPORTS)
        index = int(np.searchsorted(end_ns, row["ts_ns"] - _HALF_SECOND_NS))
        excess[min(index, len(end_ns) - 1)] += int(row["n"]) * (1 if is_import else -1)
    sums = np.cumsum(np.sign(excess))
    n = int(sums.argmax()) + 1
    if sums[n - 1] <= 0 or n == len(end_ns):
        return 0
    is_steady = (
        n_calls[:n] >= _STEADY_SHARE * np.median(n_calls[n_calls > 0]) if n_calls.any() else np.zeros(n)
    )
    return 0 if n > len(end_ns) / 2 and is_steady.mean() > 0.5 else n


def _steady(counted: Array, is_within: Array, since_ns: int) -> Array:
    """The counts since a moment. Counts of intervals that began before it are reduced in proportion.

    Estimates come from the time in which the probes were on. If they were off since that moment, the last estimate
    before it is used.
    """
    rows = counted[is_within]
    interval_ns = np.maximum(rows["interval_ns"], 1)
    share = np.clip((rows["ts_ns"] - since_ns) / interval_ns, 0, 1)
    share = np.where(share < _WHOLE, share, 1.0)
    rows = rows[share > 0]
    for name in ("n", "total_ns", "count_bytes", "interval_ns"):
        rows[name] = np.rint(rows[name] * share[share > 0])
    known = np.unique(rows["op"])
    earlier = counted[(counted["is_estimate"] > 0) & ~np.isin(counted["op"], known)]
    last = [
        earlier[(earlier["op"] == op) & (earlier["ts_ns"] == earlier["ts_ns"][earlier["op"] == op].max())]
        for op in np.unique(earlier["op"])
    ]
    return np.concatenate([rows, *last])


def _idle(spent_ns: Array, n_calls: Array) -> Array:
    """Whether a process made no GPU call and waited, in each interval between two snapshots: bool (n,)."""
    waited = spent_ns[:, [category - 1 for category in _IDLE]].sum(axis=1)
    is_idle = (waited > _IDLE_SHARE * np.maximum(spent_ns.sum(axis=1), 1)) & (n_calls == 0)
    return is_idle if not is_idle.all() else np.zeros(len(is_idle), bool)


def _paused_ns(trace: Trace, node: int, pid: int, begin_ns: Array, end_ns: Array, sleep_ns: Array) -> Array:
    """Time in sleeps of a second and more, in each interval: (n,). A sleep of this length is intended.

    A sleep is recorded at its end. In a process that pauses, the sleep at the end of the trace is a pause as well.
    sleep_ns: all sleep by the ledger.
    """
    rows = trace.offcpu
    rows = rows[(rows["node"] == node) & (rows["pid"] == pid) & (rows["category"] == Category.SLEEP)]
    pauses = rows[rows["duration_ns"] >= _PAUSE_NS]
    paused_ns = _overlap_ns(pauses, begin_ns, end_ns)
    if len(pauses):
        unfinished_ns = sleep_ns[-1] - _overlap_ns(rows, begin_ns[-1:], end_ns[-1:])[0]
        paused_ns[-1] += max(unfinished_ns, 0)
    return paused_ns


def _overlap_ns(rows: Array, begin_ns: Array, end_ns: Array) -> Array:
    """The time that rows share with each interval: int64 (n,)."""
    first, last = rows["ts_ns"], rows["ts_ns"] + rows["duration_ns"]
    overlap = np.minimum(last[:, None], end_ns[None, :]) - np.maximum(first[:, None], begin_ns[None, :])
    return np.maximum(overlap, 0).sum(axis=0).astype(np.int64)


def _within(ts_ns: Array, end_ns: Array, is_left_out: Array) -> Array:
    """Whether rows for the second before ts_ns lie in intervals that are not left out: bool (n,)."""
    index = np.searchsorted(end_ns, ts_ns - _HALF_SECOND_NS)
    return (index < len(end_ns)) & ~is_left_out[np.minimum(index, len(is_left_out) - 1)]


def _calls(counted: Array, seconds: float, symbols: Sequence[str]) -> dict[str, Calls]:
    is_copy = counted["op"] == Op.COPY
    direction, host = counted["direction"], counted["host_memory"]
    is_small = counted["count_bytes"] <= 1024 * np.maximum(counted["n"], 1)
    to_device, to_host = direction == Direction.HOST_TO_DEVICE, direction == Direction.DEVICE_TO_HOST
    # A blocking copy to the host also waits for queued work, an asynchronous copy to pinned memory never waits.
    is_async = np.array(["Async" in symbol for symbol in symbols] or [False])[counted["symbol"]]
    may_block = to_device | (to_host & is_async)
    kinds = {
        "synchronise": counted["op"] == Op.SYNC,
        "launch": counted["op"] == Op.LAUNCH,
        "graph_launch": counted["op"] == Op.GRAPH_LAUNCH,
        "copy_to_device": is_copy & to_device,
        "copy_to_host": is_copy & to_host & ~is_small,
        "read_back": is_copy & to_host & is_small,
        "pageable_copy": is_copy & (to_device | to_host) & ~is_small & (host == HostMemory.PAGEABLE),
        "copy_of_unknown_memory": is_copy & may_block & ~is_small & (host == HostMemory.UNKNOWN),
        "allocate": counted["op"] == Op.ALLOC,
        "free": counted["op"] == Op.FREE,
    }
    return {name: _summed(counted[is_kind], seconds) for name, is_kind in kinds.items()}


def _summed(rows: Array, seconds: float) -> Calls:
    n = float(rows["n"].sum())
    if not n:
        return Calls()
    total_ns = float(rows["total_ns"].sum())
    seconds = _covered_s(rows, seconds)
    return Calls(
        per_second=n / seconds,
        share=total_ns / 1e9 / seconds,
        mean_us=total_ns / n / 1e3,
        bytes_per_call=float(rows["count_bytes"].sum()) / n,
        n_seen=int(rows["n_seen"].sum()),
        is_estimate=bool(rows["is_estimate"].any()),
    )


def _covered_s(rows: Array, seconds: float) -> float:
    """The time that counts cover. Probes of frequent calls are off part of the time and write no rows then."""
    if not rows["is_estimate"].any():
        return seconds
    _, first = np.unique(rows["ts_ns"], return_index=True)
    return min(float(rows["interval_ns"][first].sum()) / 1e9, seconds) or seconds


def _budget(spent_ns: Array, calls: dict[str, Calls]) -> dict[str, float]:
    """Shares by item. Launches without ledger time get their time from the counts; it is subtracted from on_cpu.

    A launch that waits for room in the queue counts as a wait for the GPU. The time of the counts includes waits for a
    CPU, which the ledger has apart: their part is assumed to be the same as of all running time.
    """
    whole = max(float(spent_ns[:N_CATEGORIES].sum()), 1.0)
    shares = {
        name: float(sum(spent_ns[category - 1] for category in categories)) / whole
        for name, categories in BUDGET.items()
    }
    runs = shares["on_cpu"] / max(shares["on_cpu"] + shares["preempted"], 1e-9)
    for name in ("launch", "graph_launch"):
        launches = calls[name]
        if not launches.is_supported or spent_ns[Category.LAUNCH - 1]:
            continue
        share, mean_us = min(launches.share * runs, shares["on_cpu"]), launches.mean_us * runs
        full = share * (1 - _TYPICAL_LAUNCH_NS / 1e3 / mean_us) if mean_us > _BLOCKED_LAUNCH_NS / 1e3 else 0.0
        shares["on_cpu"] -= share
        shares["gpu_wait"] += full
        shares["launches"] += share - full
    return shares


def _identity(trace: Trace, node: int, pid: int) -> tuple[int, str, tuple[str, ...]]:
    """The rank, the name and the communication libraries of a process."""
    rows = trace.processes[(trace.processes["node"] == node) & (trace.processes["pid"] == pid)]
    if not len(rows):
        return UNKNOWN, "", ()
    command, libraries = (rows[name][0].decode("utf-8", "replace") for name in ("comm", "libraries"))
    return int(rows["rank"][0]), command, tuple(name for name in libraries.split(", ") if name)


def _gpu(trace: Trace, node: int, pid: int, *, begin_ns: Array, end_ns: Array) -> Gpu | None:
    """The state of the process's GPU over its active intervals; None if the driver was not queried."""
    number, others = _gpu_number(trace, node, pid)
    rows = trace.gpus[(trace.gpus["node"] == node) & (trace.gpus["mig"] == UNKNOWN)]
    if number is None and len(np.unique(rows["gpu"])) == 1:
        number = int(rows["gpu"][0])
    rows = rows[rows["gpu"] == number] if number is not None else rows[:0]
    if not len(rows):
        return None
    rows = rows[np.argsort(rows["ts_ns"], kind="stable")]
    weight = _held_ns(rows["ts_ns"], begin_ns, end_ns)
    busy, busy_range = _busy(rows, weight, int(begin_ns[0]), int(end_ns[-1]))
    last = rows[-1]
    return Gpu(
        number=int(last["gpu"]),
        name=last["name"].decode("utf-8", "replace"),
        busy=busy,
        busy_range=busy_range,
        memory_used_bytes=_known(int(rows["memory_used_bytes"].max())),
        memory_total_bytes=_known(int(last["memory_total_bytes"])),
        sm_mhz=known_mean(rows["sm_mhz"], weight * np.maximum(rows["utilization_percent"], 0)),
        sm_max_mhz=_known(int(last["sm_max_mhz"])),
        power_w=_thousandth(known_mean(rows["power_mw"], weight)),
        power_limit_w=_thousandth(_known(int(last["power_limit_mw"]))),
        is_power_limited=bool(max(int(last["clock_reasons"]), 0) & LOWERED_POWER_LIMIT),
        throttled=_throttled(rows, weight),
        others=others,
        others_busy=_others_busy(trace, node, int(last["gpu"]), pid, begin_ns=begin_ns, end_ns=end_ns),
        **_counters(trace, node, int(last["gpu"]), begin_ns=begin_ns, end_ns=end_ns),
    )


def _counters(
    trace: Trace, node: int, gpu: int, *, begin_ns: Array, end_ns: Array
) -> dict[str, float | None]:
    """Use of multiprocessors and memory in the readings that lie within the intervals for most of their time."""
    rows = trace.gpu_counters[(trace.gpu_counters["node"] == node) & (trace.gpu_counters["gpu"] == gpu)]
    since_ns, until_ns = rows["ts_ns"] - rows["interval_ns"], rows["ts_ns"]
    inside_ns = np.minimum(until_ns[:, None], end_ns) - np.maximum(since_ns[:, None], begin_ns)
    weight = np.maximum(inside_ns, 0).sum(axis=1)
    weight[weight < _WHOLE * rows["interval_ns"]] = 0
    return {
        "sm_active": _percent(known_mean(rows["sm_percent"], weight)),
        "memory_bandwidth": _percent(known_mean(rows["memory_percent"], weight)),
    }


def _others_busy(trace: Trace, node: int, gpu: int, pid: int, *, begin_ns: Array, end_ns: Array) -> float:
    """Share of the time in which the GPU worked for other processes, by its driver; 0 if it is not reported.

    Processes take turns on a GPU, so their shares of a reading add up to 100 at most. A reading that covers
    time before or after this process as well may be about a process that does not share the GPU with it. Such readings
    count only if the readings inside cover too little of the time.
    """
    rows = trace.gpu_use[(trace.gpu_use["node"] == node) & (trace.gpu_use["gpu"] == gpu)]
    ts_ns, reading = np.unique(rows["ts_ns"], return_inverse=True)
    if not len(ts_ns):
        return 0.0
    percent = np.zeros((2, len(ts_ns)))
    np.add.at(percent, ((rows["pid"] != pid).astype(int), reading), rows["sm_percent"])
    share = percent[1] / np.maximum(percent.sum(axis=0), 100)
    weight = _held_ns(ts_ns, begin_ns, end_ns)
    whole = np.where(_inside(ts_ns, weight, int(begin_ns[0]), int(end_ns[-1])) >= _WHOLE, weight, 0.0)
    if whole.sum() >= _ENOUGH_WHOLE * weight.sum():
        weight = whole
    return float((share * weight).sum() / max(float(weight.sum()), 1.0))


def _gpu_number(trace: Trace, node: int, pid: int) -> tuple[int | None, tuple[str, ...]]:
    """The GPU of a process, and the other processes that use it, by name and pid.

    A process has a row when it appears, each half minute, and when it ends.
    """
    rows = trace.gpu_processes[trace.gpu_processes["node"] == node]
    on_gpu = rows[rows["pid"] == pid]
    records = trace.processes[(trace.processes["node"] == node) & (trace.processes["pid"] == pid)]
    if len(on_gpu):
        number = int(on_gpu["gpu"][-1])
    elif len(records) and records["device"][0] != UNKNOWN:
        number = int(records["device"][0])
    else:
        return None, ()
    states = trace.snapshots[(trace.snapshots["node"] == node) & (trace.snapshots["pid"] == pid)]["ts_ns"]
    is_other = (rows["gpu"] == number) & (rows["pid"] != pid)
    is_near = (rows["ts_ns"] >= states.min() - _LISTED_EVERY_NS) & (rows["ts_ns"] <= states.max())
    names: dict[int, str] = {}
    for row in rows[is_other & is_near][np.argsort(rows["ts_ns"][is_other & is_near], kind="stable")]:
        if row["alive"]:
            names[int(row["pid"])] = f"{row['comm'].item().decode('utf-8', 'replace')} {row['pid']}".strip()
        elif row["ts_ns"] < states.min():
            names.pop(int(row["pid"]), None)
    seen = trace.processes[trace.processes["node"] == node]
    is_before = (seen["ended_ns"] != UNKNOWN) & (seen["ended_ns"] < states.min())
    for ended in seen["pid"][is_before].tolist():
        names.pop(ended, None)
    return number, tuple(names.values())


_THROTTLES = {
    "software power cap": 0x4,
    "hardware slowdown": 0x8,
    "software thermal slowdown": 0x20,
    "hardware thermal slowdown": 0x40,
    "hardware power brake": 0x80,
}


def _throttled(rows: Array, weight: Array) -> dict[str, float]:
    """Share of the time in which the driver gave each reason for a lower clock."""
    whole = max(float(weight.sum()), 1.0)
    reasons = np.where(rows["clock_reasons"] == UNKNOWN, 0, rows["clock_reasons"])
    shares = {name: float(weight[reasons & bit > 0].sum()) / whole for name, bit in _THROTTLES.items()}
    return {name: round(share, 3) for name, share in shares.items() if share > 0}


def _held_ns(ts_ns: Array, begin_ns: Array, end_ns: Array) -> Array:
    """The time that each reading covers within the intervals: (n,). A reading covers the second before it as well."""
    since, until = _covered_ns(ts_ns, int(begin_ns[0]))
    overlap = np.minimum(until[:, None], end_ns[None, :]) - np.maximum(since[:, None], begin_ns[None, :])
    return np.maximum(overlap, 0).sum(axis=1).astype(np.float64)


def _covered_ns(ts_ns: Array, first_ns: int) -> tuple[Array, Array]:
    """The begin and the end of the time that each reading covers; the last reading covers all later time."""
    since = ts_ns - _QUERY_NS
    since[0] = min(int(since[0]), first_ns)
    return since, np.append(ts_ns[1:] - _QUERY_NS, np.iinfo(np.int64).max)


def _inside(ts_ns: Array, held_ns: Array, begin_ns: int, end_ns: int) -> Array:
    """The share of the time that each reading covers which lies within the intervals: (n,). held_ns: see _held_ns()."""
    since, until = _covered_ns(ts_ns, begin_ns)
    until[-1] = max(int(ts_ns[-1]), end_ns)
    return np.asarray(held_ns / np.maximum(until - since, 1))


def _busy(
    rows: Array, held_ns: Array, begin_ns: int, end_ns: int
) -> tuple[float | None, tuple[float, float]]:
    """The busy share of a GPU in the time examined, and its interval.

    Readings inside that time are uncertain by their spread. Without enough of them, readings that also cover time
    outside are used: the GPU may have been idle or busy in that part.
    """
    is_known = (rows["utilization_percent"] != UNKNOWN) & (held_ns > 0)
    if not is_known.any():
        return _percent(known_mean(rows["utilization_percent"], held_ns)), (0.0, 1.0)
    weight, shares = held_ns[is_known], rows["utilization_percent"][is_known] / 100
    inside = np.clip(_inside(rows["ts_ns"], held_ns, begin_ns, end_ns)[is_known], 1e-3, 1.0)
    is_whole = inside >= _WHOLE
    if weight[is_whole].sum() >= _ENOUGH_WHOLE * weight.sum():
        weight, shares, inside = weight[is_whole], shares[is_whole], np.ones(int(is_whole.sum()))
    at_least, mean, at_most = (
        float(np.average(values, weights=weight))
        for values in (
            np.maximum((shares - (1 - inside)) / inside, 0),
            shares,
            np.minimum(shares / inside, 1),
        )
    )
    half = Z_80 * standard_error(shares, weight, spread=_BUSY_SPREAD) + _ROUNDING
    return mean, (max(min(at_least, mean) - half, 0.0), min(max(at_most, mean) + half, 1.0))


def standard_error(values: Array, weight: Array, *, spread: float) -> float:
    """The standard error of the weighted mean of some values.

    Few values do not show their spread. Their variance is therefore averaged with the typical variance, spread**2,
    which counts as much as two values.
    """
    n = float(weight.sum() ** 2 / max(float((weight**2).sum()), 1e-9))
    mean = np.average(values, weights=weight)
    variance = float(np.average((values - mean) ** 2, weights=weight))
    return float(((n * variance + 2 * spread**2) / (n + 1) / n) ** 0.5)


def _known(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _percent(value: float | None) -> float | None:
    return None if value is None else value / 100


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000


@dataclass(frozen=True)
class Location:
    """A line of the user's code with the share of the samples in it. doing: the most frequent state."""

    line: str
    share: float
    doing: str


def locations(activity: Activity, role: SampleRole = SampleRole.GPU, *, most: int = 5) -> list[Location]:
    """The code locations of a role's samples, the largest share first."""
    rows = activity.of_role(role)
    counts: Counter[str] = Counter()
    states: dict[str, Counter[str]] = {}
    for row in rows:
        if line := user_line(activity.frames(row)):
            counts[line] += int(row["n"])
            states.setdefault(line, Counter())[item_of(int(row["category"]))] += int(row["n"])
    whole = max(int(rows["n"].sum()), 1)
    return [
        Location(line, n / whole, states[line].most_common(1)[0][0]) for line, n in counts.most_common(most)
    ]


_ITEM = {int(category): name for name, categories in BUDGET.items() for category in categories}


def item_of(category: int) -> str:
    """The budget's item of a ledger category."""
    return _ITEM.get(category, "other")
