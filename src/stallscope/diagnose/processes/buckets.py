"""The time of a process's GPU thread, sorted by reason: each sample goes into one bucket.

The ledger gives the exact share of each state, samples give its lines and objects: a sample counts for the share of its
state divided by the samples of that state. The blocked states are weighted together where a child process woke the
thread, since the ledger learns that only at the end of a wait.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from stallscope.diagnose.processes import code_locations
from stallscope.diagnose.processes.activity import BUDGET, Activity, item_of, standard_error
from stallscope.diagnose.processes.code_locations import function, is_own, is_python, matches, user_line
from stallscope.diagnose.processes.cpu_waits import CpuWaits
from stallscope.events.layout import Array
from stallscope.events.names import Category, SampleRole

_BLOCKED = ("locks", "child", "disk", "network", "sleep", "other")
_TOGETHER = {"launches": "on_cpu"}
_MIN_CHILD_SHARE = 0.02
_ENOUGH_STACKS = 5
_MIN_HOLDING = 0.5
_MIN_IMPORT_SECONDS, _MOST_SECONDS = 4, 0.5
_IN_LOOP, _MIN_GPU_IN_LOOP, _MIN_IN_LOOP = 0.95, 0.03, 20
"""Shares of the samples: in a function that contains the loop, and of GPU waits and launches there. Among fewer samples
than the last number, all may be in one function of a step by chance.
"""
_MIN_COMPILER_SHARE = 0.25
"""Share of the waits for programs at a line in which a compiler is seen: before it starts, and as it ends, the program
has another name or none.
"""
LEFT = -2
"""System call of a sample whose thread left its wait before the call was read. It counts as the waits at its line; at a
line without waits, its stack was read after the wait as well, and it is left out.
"""

_CHILD_ENDS = frozenset((61, 247))
_FILE_LOCKS = frozenset((73, 72))
_WRITES = frozenset((1, 18, 20, 74, 75, 77, 277, 285, 296, 306, 328))
_SYNCS = frozenset((74, 75, 277, 306))
_WORKERS = re.compile(r"multiprocessing/(pool|queues|connection|managers)\.py|concurrent/futures/process\.py")
_FUTURES = re.compile(r"concurrent/futures/_base\.py|multiprocessing/pool\.py")
_COMPILERS = re.compile(r"\b(nvcc|ptxas|cicc|cc1plus|cc1|g\+\+|gcc|c\+\+|clang|ld|ninja)\b")


@dataclass
class Shares:
    """Shares by name; 0 for an unknown name."""

    by_name: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, share: float) -> None:
        """Add to the share of a name."""
        self.by_name[name] = self.by_name.get(name, 0.0) + share

    def of(self, name: str) -> float:
        """The share of a name."""
        return self.by_name.get(name, 0.0)

    def largest(self, most: int = 1) -> list[tuple[str, float]]:
        """The names with the largest shares, the largest first."""
        return sorted(self.by_name.items(), key=lambda item: -item[1])[:most]


@dataclass
class Bucket:
    """share: of the wall clock. lines, objects, parts: shares by line of code, object and activity.

    by_state: the part of the share in each state of the ledger. variance: of the share. The ledger is exact for the
    time examined, so two things are uncertain: the division of a state among several buckets, and whether the time
    examined is typical of the process. cpu_waits: by line, the additional time in which the thread waited for a CPU at
    the lines of this bucket; that time is in the bucket cpu_preemption as well.
    """

    share: float = 0.0
    variance: float = 0.0
    by_state: Shares = field(default_factory=Shares)
    lines: Shares = field(default_factory=Shares)
    objects: Shares = field(default_factory=Shares)
    parts: Shares = field(default_factory=Shares)
    cpu_waits: Shares = field(default_factory=Shares)
    n_samples: int = 0
    seconds: set[int] = field(default_factory=set)

    @property
    def error(self) -> float:
        """The standard error of the share."""
        return float(self.variance**0.5)

    @property
    def line(self) -> str:
        """The line with the largest share; empty where no stack is known."""
        return next((line for line, _ in self.lines.largest()), "")

    @property
    def object(self) -> str:
        """The object with the largest share."""
        return next((name for name, _ in self.objects.largest()), "")


class Threads(NamedTuple):
    """The other threads of a process: whether a thread waits for worker processes, or for a program.

    holds_interpreter_lock: whether they run Python code while the GPU thread waits for locks. is_working: whether most
    samples of them are in the user's code.
    """

    holds_interpreter_lock: bool
    is_for_workers: bool
    is_for_program: bool
    is_working: bool


CLIENT = "client connection from"
"""How the object of a server's wait for its clients begins, as the capture writes it. It is not a fault."""

TIMER = "a timer of an event loop"
"""The object of a wait of an event loop without connections, as the capture writes it."""

NEW_CONNECTIONS = "new connections"
"""The object of a server's wait for its next client, as the capture writes it. It is not a fault either."""

TERMINAL = "/dev/pts/"
"""How the object of a write to a pseudo terminal begins. A write that blocks waits for the terminal's reader."""

LOCK = "lock on"
"""How the object of a wait for a file lock begins, as the capture writes it, also of a sleep between two attempts."""


_NEW_PAGES = "page faults"
"""How the object of a sample in page faults begins: of a thread that runs, or that waits for a CPU."""

INTERPRETER_LOCK = "holds the interpreter lock"
"""The object of a sample of a thread that holds Python's interpreter lock, as the capture writes it."""

_PREEMPTED = "cpu_preemption"

SHARED_LOCK = "a lock shared with other processes"
"""The object of a wait for a lock or a semaphore in shared memory, as the capture writes it."""


def buckets(activity: Activity) -> dict[str, Bucket]:
    """The buckets of a process by name; the states of the ledger without samples are in the bucket of their item."""
    out: dict[str, Bucket] = {}
    threads = _threads(activity)
    loops = _loops(activity)
    at_line: dict[str, tuple[str, str]] = {}
    polls_lock_at = _polls_lock_at(activity)
    is_import_work = _imports_continue(activity)
    waits = CpuWaits()
    running = list(_running(activity))
    rows = sorted([*weighted(activity), *running], key=lambda pair: int(pair[0]["syscall_nr"]) == LEFT)
    for row, weight in rows:
        frames = activity.frames(row)
        name, part = _reason(activity, row, frames, threads, loops)
        if name == "imports" and is_import_work:
            name = _BY_ITEM.get(part, part)
        if name == "host_sleep" and user_line(frames) in polls_lock_at:
            name, part = "file_lock", "polling"
        if row["syscall_nr"] == LEFT:
            name, part = at_line.get(user_line(frames), (name, part))
        elif item_of(int(row["category"])) in _BLOCKED:
            at_line[user_line(frames)] = name, part
        bucket = out.setdefault(name, Bucket())
        bucket.share += weight
        bucket.by_state.add(_stratum(activity, int(row["category"])), weight)
        bucket.n_samples += int(row["n"])
        bucket.seconds.add(int(row["ts_ns"]) // 10**9)
        if line := user_line(frames):
            bucket.lines.add(line, weight)
        text = text_of(row, "object")
        is_other = (
            text in (TIMER, NEW_CONNECTIONS)
            or text.startswith(_NEW_PAGES)
            or (text.startswith(LOCK) and name != "file_lock")
        )
        if text and not is_other:
            bucket.objects.add(text, weight)
        bucket.parts.add(part, weight)
        if name == "host_compute" and running:
            continue  # it does not include waits for a CPU, which may belong to another bucket of its line
        if name != _PREEMPTED:
            waits.add_work(frames, name, user_line(frames), weight)
        elif text.startswith(_NEW_PAGES):
            waits.add_wait(frames, weight, of="page_fault")
        else:
            waits.add_wait(frames, weight)
    for item, share in _unsampled(activity).items():
        bucket = out.setdefault(_BY_ITEM.get(item, item), Bucket())
        bucket.share += share
        bucket.by_state.add(_stratum_of(activity, item), share)
        bucket.parts.add(item, share)
    _join_compilers(out)
    _join_lines(out)
    _join_serialisation(out, loops)
    _divide_cpu_waits(out, waits)
    _add_variances(activity, out)
    return out


def _polls_lock_at(activity: Activity) -> set[str]:
    """The lines that sleep mostly while another process holds a lock on a file of this process."""
    n_all, n_locked = Counter[str](), Counter[str]()
    for row in activity.of_role(SampleRole.GPU):
        if item_of(int(row["category"])) == "sleep" and row["syscall_nr"] != LEFT:
            line = user_line(activity.frames(row))
            n_all[line] += int(row["n"])
            n_locked[line] += int(row["n"]) if text_of(row, "object").startswith(LOCK) else 0
    return {line for line, n in n_locked.items() if 2 * n > n_all[line]}


def _add_variances(activity: Activity, out: dict[str, Bucket]) -> None:
    """The variance of each bucket: binomial, of its part of each state, and between the intervals of the ledger."""
    n_samples: Counter[str] = Counter()
    for row in activity.of_role(SampleRole.GPU):
        n_samples[_stratum(activity, int(row["category"]))] += int(row["n"])
    n_samples["on_cpu"] = n_samples["on_cpu"] or n_samples["preempted"]
    whole, by_interval = _stratum_shares(activity), _interval_shares(activity)
    length = activity.spent_ns.sum(axis=1)
    for bucket in out.values():
        course = np.zeros(len(length))
        for stratum, share in bucket.by_state.by_name.items():
            part = min(share / max(whole.of(stratum), 1e-9), 1.0)
            bucket.variance += whole.of(stratum) ** 2 * part * (1 - part) / max(n_samples[stratum], 1)
            course += part * np.array(by_interval[stratum]) * length.sum() / np.maximum(length, 1)
        spread = _SPREAD * bucket.share + _MIN_SPREAD
        bucket.variance += standard_error(course, length, spread=spread) ** 2


_SPREAD, _MIN_SPREAD = 0.1, 0.01
"""The typical spread of a steady share from second to second, relative to the share, and its minimum."""


def _join_lines(out: dict[str, Bucket]) -> None:
    """Count the work on the CPU at a line as part of the wait at the same line, where the wait is longer.

    A read, a copy or an allocation also takes CPU time: removing the operation saves both.
    """
    compute = out.get("host_compute")
    for line, share in list(compute.lines.by_name.items()) if compute else []:
        name = max(_OPERATIONS & out.keys(), key=lambda name: out[name].lines.of(line), default="")
        if compute and name and out[name].lines.of(line) > share:
            _move_line(line, share, compute, out[name], part="on_cpu")


def _join_compilers(out: dict[str, Bucket]) -> None:
    """Count the waits for programs at a line that starts compilers as compilation."""
    programs, compilation = out.get("child_program"), out.get("recompilation")
    if programs is None or compilation is None:
        return
    for line, share in list(programs.lines.by_name.items()):
        compiling = compilation.lines.of(line)
        if share > 0 and compiling >= _MIN_COMPILER_SHARE * (compiling + share):
            moved = share / programs.share
            for state, in_state in list(programs.by_state.by_name.items()):
                programs.by_state.add(state, -moved * in_state)
                compilation.by_state.add(state, moved * in_state)
            programs.share -= share
            del programs.lines.by_name[line]
            compilation.share += share
            compilation.lines.add(line, share)


def _join_serialisation(out: dict[str, Bucket], loops: frozenset[tuple[str, str]]) -> None:
    """Count page faults in the function that writes a checkpoint as part of the checkpoint.

    A function that contains the loop, or waits for the GPU, does other work as well.
    """
    checkpoint, faults = out.get("checkpoint"), out.get("page_fault")
    if checkpoint is None or faults is None or checkpoint.share < _MIN_CHECKPOINT_SHARE:
        return
    saving = function(checkpoint.line)
    gpu_lines = out["gpu_wait"].lines.by_name if "gpu_wait" in out else {}
    if not checkpoint.line or saving in loops or any(function(line) == saving for line in gpu_lines):
        return
    for line, share in list(faults.lines.by_name.items()):
        if function(line) == saving and faults.by_state.of("on_cpu") >= share:
            _move_line(line, share, faults, checkpoint, part="serialise")


def _divide_cpu_waits(out: dict[str, Bucket], waits: CpuWaits) -> None:
    """Add the waits for a CPU to the buckets of the work that they delay."""
    for name, line, share in waits.divided():
        # The work on the CPU at a line may have been counted as part of another bucket.
        at_line = max(out, key=lambda each: out[each].lines.of(line) if each != _PREEMPTED else 0.0)
        is_moved = not out[name].lines.of(line) and out[at_line].lines.of(line) > 0
        out[at_line if is_moved else name].cpu_waits.add(line, share)


def _move_line(line: str, share: float, source: Bucket, target: Bucket, *, part: str) -> None:
    """Count the CPU time at a line of a bucket as a part of another bucket."""
    source.share -= share
    source.by_state.add("on_cpu", -share)
    del source.lines.by_name[line]
    target.share += share
    target.by_state.add("on_cpu", share)
    target.lines.add(line, share)
    target.parts.add(part, share)


_MIN_CHECKPOINT_SHARE = 0.05

_OPERATIONS = {
    "block_io",
    "page_fault",
    "cuda_alloc",
    "host_device_copy",
    "file_lock",
    "full_pipe",
    "network_wait",
    "child_program",
    "child_wait",
    "gpu_wait",
}
"""Buckets of operations that wait."""


_BY_ITEM = {
    "on_cpu": "host_compute",
    "launches": "host_compute",
    "copies": "host_device_copy",
    "allocation": "cuda_alloc",
    "locks": "lock_contention",
    "child": "child_wait",
    "disk": "block_io",
    "network": "network_wait",
    "sleep": "host_sleep",
    "preempted": "cpu_preemption",
    "stopped": "process_stopped",
    "page_faults": "page_fault",
    "other": "blocked",
}


def _threads(activity: Activity) -> Threads:
    others = activity.of_role(SampleRole.SAME_PROCESS)
    n_working = others["n"][[is_own(user_line(activity.frames(row))) for row in others]].sum()
    return Threads(
        holds_interpreter_lock=_holds_interpreter_lock(activity),
        is_for_workers=any(matches(activity.frames(row), _WORKERS) for row in others),
        is_for_program=bool(np.isin(others["syscall_nr"], list(_CHILD_ENDS)).any())
        or (activity.budget["child"] >= _MIN_CHILD_SHARE and len(activity.of_role(SampleRole.CHILD)) > 0),
        is_working=bool(2 * n_working > others["n"].sum()),
    )


def with_timers_as_sleep(activity: Activity) -> Activity:
    """The activity with the waits of an event loop that sleeps as sleep; the ledger has them as network waits."""
    samples = activity.samples
    is_net = (samples["role"] == SampleRole.GPU) & (samples["category"] == Category.NET)
    is_timer = is_net & (samples["object"] == TIMER.encode())
    if not is_timer.any() or _reason_of_event_loop(_threads(activity)) != "host_sleep":
        return activity
    samples, budget = samples.copy(), dict(activity.budget)
    lines = {user_line(activity.frames(row)) for row in samples[is_timer]}
    is_left = is_net & (samples["syscall_nr"] == LEFT)
    is_timer[is_left] = [user_line(activity.frames(row)) in lines for row in samples[is_left]]
    moved = budget["network"] * float(samples["n"][is_timer].sum() / samples["n"][is_net].sum())
    budget["network"] -= moved
    budget["sleep"] += moved
    samples["category"][is_timer] = Category.SLEEP
    return replace(activity, samples=samples, budget=budget)


def weighted(activity: Activity) -> Iterator[tuple[Array, float]]:
    """The samples of the GPU thread with the share of the wall clock that each row counts for.

    The ledger's share of a state in an interval is divided among the samples of this state in this interval. Shares of
    intervals without such samples are divided among all samples of the state.
    """
    rows, interval = _with_stacks(activity)
    n_of: Counter[tuple[str, int]] = Counter()
    n_all: Counter[str] = Counter()
    for row, at in zip(rows, interval.tolist(), strict=True):
        stratum = _stratum(activity, int(row["category"]))
        n_of[stratum, at] += int(row["n"])
        n_all[stratum] += int(row["n"])
    shares, by_interval = _stratum_shares(activity), _interval_shares(activity)
    known = Shares()
    for stratum, at in n_of:
        known.add(stratum, by_interval[stratum][at])
    for row, at in zip(rows, interval.tolist(), strict=True):
        stratum, n = _stratum(activity, int(row["category"])), int(row["n"])
        own = by_interval[stratum][at] / n_of[stratum, at]
        rest = max(shares.of(stratum) - known.of(stratum), 0.0) / n_all[stratum]
        whole = max(known.of(stratum), shares.of(stratum), 1e-9)
        yield row, n * (own + rest) * shares.of(stratum) / whole


def _interval_shares(activity: Activity) -> dict[str, list[float]]:
    """The share of the wall clock in each stratum and interval."""
    whole = max(float(activity.spent_ns.sum()), 1.0)
    out: dict[str, list[float]] = {}
    for item, categories in BUDGET.items():
        spent = activity.spent_ns[:, [category - 1 for category in categories]].sum(axis=1) / whole
        stratum = _stratum_of(activity, item)
        out[stratum] = [a + b for a, b in zip(out.get(stratum, [0.0] * len(spent)), spent, strict=True)]
    return out


def _with_stacks(activity: Activity) -> tuple[Array, Array]:
    """The samples of the GPU thread and their intervals; samples without a stack are left out if enough of their state
    have a stack, and samples whose wait is unknown if others of their state are known.
    """
    is_gpu = activity.samples["role"] == SampleRole.GPU
    is_gpu[is_gpu] = _has_known_wait(activity, activity.samples[is_gpu])
    rows, interval = activity.samples[is_gpu], activity.interval[is_gpu]
    has_stack = rows["stack"] >= 0
    known: Counter[int] = Counter()
    for row in rows[has_stack]:
        known[int(row["category"])] += int(row["n"])
    is_enough = np.array([known[int(category)] >= _ENOUGH_STACKS for category in rows["category"]], bool)
    return rows[has_stack | ~is_enough], interval[has_stack | ~is_enough]


def _has_known_wait(activity: Activity, rows: Array) -> Array:
    """Whether the wait of each sample is known: it was read, or it was read for another sample of the same line.

    All True for a state in which no wait was read.
    """
    lines = [user_line(activity.frames(row)) for row in rows]
    strata = [_stratum(activity, int(category)) for category in rows["category"]]
    known = {
        (stratum, line)
        for stratum, line, nr in zip(strata, lines, rows["syscall_nr"], strict=True)
        if nr != LEFT
    }
    states = {stratum for stratum, _ in known}
    return np.array(
        [
            (stratum, line) in known or stratum not in states
            for stratum, line in zip(strata, lines, strict=True)
        ],
        bool,
    )


def _stratum(activity: Activity, category: int) -> str:
    return _stratum_of(activity, item_of(category))


def _stratum_of(activity: Activity, item: str) -> str:
    if item in _BLOCKED and activity.budget["child"] >= _MIN_CHILD_SHARE:
        return "blocked"
    return _TOGETHER.get(item, item)


def _stratum_shares(activity: Activity) -> Shares:
    shares = Shares()
    for item, share in activity.budget.items():
        shares.add(_stratum_of(activity, item), share)
    return shares


def _running(activity: Activity) -> Iterator[tuple[Array, float]]:
    """The samples of a thread that waits for a CPU, as samples of its time on the CPU, if that has no sample.

    On a busy machine a thread is seldom on the CPU, and it is displaced where it runs.
    """
    rows = activity.of_role(SampleRole.GPU)
    if "on_cpu" in _sampled_strata(activity):
        return
    rows = rows[(rows["category"] == Category.PREEMPTED) & (rows["stack"] >= 0)].copy()
    rows["category"] = Category.ON_CPU
    share = _stratum_shares(activity).of("on_cpu")
    for row in rows if share > 0 else []:
        yield row, share * int(row["n"]) / int(rows["n"].sum())


def _sampled_strata(activity: Activity) -> set[str]:
    return {_stratum(activity, int(category)) for category in activity.of_role(SampleRole.GPU)["category"]}


def _unsampled(activity: Activity) -> dict[str, float]:
    """The shares of ledger items whose stratum has no sample."""
    sampled = _sampled_strata(activity) | {"on_cpu" for _ in _running(activity)}
    missing = {}
    for item, share in activity.budget.items():
        if _stratum_of(activity, item) not in sampled and share > 0:
            missing[item] = share
    return missing


def _loops(activity: Activity) -> frozenset[tuple[str, str]]:
    """The functions that contain the whole loop, whatever their names state: file and function."""
    n: Counter[tuple[str, str]] = Counter()
    n_gpu: Counter[tuple[str, str]] = Counter()
    n_all = 0
    for row in activity.of_role(SampleRole.GPU):
        n_all += int(row["n"])
        for each in {function(frame) for frame in activity.frames(row)}:
            n[each] += int(row["n"])
            n_gpu[each] += int(row["n"]) if item_of(int(row["category"])) in ("gpu_wait", "launches") else 0
    if n_all < _MIN_IN_LOOP:
        return frozenset()
    return frozenset(
        each for each in n if n[each] >= _IN_LOOP * n_all and n_gpu[each] >= _MIN_GPU_IN_LOOP * n_all
    )


def _imports_continue(activity: Activity) -> bool:
    """Whether most examined seconds contain imports: a module is loaded in each step, not when it is first used."""
    rows = activity.of_role(SampleRole.GPU)
    is_import = [matches(activity.frames(row), code_locations.IMPORTS) for row in rows]
    seconds = rows["ts_ns"] // 10**9
    n_seconds = len(np.unique(seconds))
    n_importing = len(np.unique(seconds[np.array(is_import, bool)]))
    return n_seconds >= _MIN_IMPORT_SECONDS and n_importing > _MOST_SECONDS * n_seconds


def _reason(
    activity: Activity,
    row: Array,
    frames: tuple[str, ...],
    threads: Threads,
    loops: frozenset[tuple[str, str]],
) -> tuple[str, str]:
    """The bucket of a sample of the GPU thread, and the activity within it."""
    item, nr = item_of(int(row["category"])), int(row["syscall_nr"])
    name = text_of(row, "object")
    if item == "on_cpu" and name.startswith(_NEW_PAGES):
        return "page_fault", "new pages"
    if matches(frames, code_locations.IMPORTS):
        return "imports", item
    if matches(frames, code_locations.COMPILES) or (
        name.startswith(("end of", "pipe written")) and _COMPILERS.search(name)
    ):
        return "recompilation", item
    inner = tuple(frame for frame in frames if function(frame) not in loops)
    if code_locations.saves(inner) or (item == "disk" and code_locations.CHECKPOINTS.search(name)):
        return "checkpoint", "fsync" if nr in _SYNCS else "write" if item == "disk" else item
    if matches(frames, code_locations.LOADS) and item not in ("gpu_wait", "launches"):
        return "input_starvation", "in the main process" if item in (
            "on_cpu",
            "disk",
            "page_faults",
        ) else "wait"
    if item in _BLOCKED:
        return _blocked_reason(item, nr, name, frames, threads), _kind_of_wait(nr, item)
    return _BY_ITEM.get(item, item), item


def _blocked_reason(item: str, nr: int, name: str, frames: tuple[str, ...], threads: Threads) -> str:
    if nr in _CHILD_ENDS or name.startswith("end of") or matches(frames, code_locations.PROGRAMS):
        return "child_program"
    if name == TIMER:
        return _reason_of_event_loop(threads)
    if name.startswith("full pipe") or (name.startswith(TERMINAL) and nr in _WRITES):
        return "full_pipe"
    if nr in _FILE_LOCKS:
        return "file_lock"
    if matches(frames, _WORKERS) or (threads.is_for_workers and matches(frames, _FUTURES)):
        return "input_starvation"
    if name.startswith("pipe"):
        return "child_wait"
    if name.startswith((CLIENT, NEW_CONNECTIONS)):
        return "request_wait"
    if item == "sleep":
        return "host_sleep"
    if item == "locks":
        if name == SHARED_LOCK:
            return "lock_contention"
        return "gil" if threads.holds_interpreter_lock and not _is_explicit(frames) else "lock_contention"
    if item == "disk" and nr == -1:
        return "page_fault"
    return _BY_ITEM.get(item, "blocked")


def _holds_interpreter_lock(activity: Activity) -> bool:
    """Whether other threads run Python code for most of the time that the GPU thread waits for locks.

    A thread that sleeps or waits for the network has given the interpreter lock back, unless the sample shows that it
    holds the lock: native code may wait without releasing it.
    """
    waits, others = activity.of_role(SampleRole.GPU), activity.of_role(SampleRole.SAME_PROCESS)
    is_running = np.isin(others["category"], (Category.ON_CPU, Category.PREEMPTED)) | is_lock_holder(others)
    n_running = sum(int(row["n"]) for row in others[is_running] if is_python(user_line(activity.frames(row))))
    n_waits = int(waits["n"][waits["category"] == Category.LOCK].sum())
    return n_running > 0 and n_running >= _MIN_HOLDING * n_waits


def is_lock_holder(samples: Array) -> Array:
    """Whether the thread of each sample held Python's interpreter lock."""
    return np.asarray(samples["object"] == INTERPRETER_LOCK.encode())


def _reason_of_event_loop(threads: Threads) -> str:
    """An event loop without connections waits for another thread, for a program that a thread waits for, or sleeps."""
    if threads.is_for_program:
        return "child_program"
    if threads.is_working:
        return "lock_contention"
    return "input_starvation" if threads.is_for_workers else "host_sleep"


def text_of(row: Array, column: str) -> str:
    """A text column of a row."""
    value: bytes = row[column].item()
    return value.decode("utf-8", "replace")


def _is_explicit(frames: tuple[str, ...]) -> bool:
    """Whether the innermost Python code waits explicitly for a lock, a queue or a thread."""
    return any(code_locations.LOCKS.search(frame) for frame in frames[:2]) or not frames


def _kind_of_wait(nr: int, item: str) -> str:
    if nr in _SYNCS:
        return "fsync"
    return "write" if nr in _WRITES else item
