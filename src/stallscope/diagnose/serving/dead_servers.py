"""Engines that accept requests and no longer answer them, although `/health` may still be answered.

An engine counts as dead under three conditions. Requests to a path wait, also requests whose clients have given up. No
request to that path has made progress for Thresholds.dead_server_ns. The threads of the engine are blocked or stopped,
because threads also work during a first request, which may take minutes (compilation, a long unstreamed generation).

A process of an engine whose other processes answer requests is dead if its own requests make no progress, or if it has
no connections and a request that was handed over makes no progress. It must be stopped, or blocked in Python code that
waits neither for work nor for a network.
"""

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.processes.code_locations import LOCKS, function, is_python, user_line
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, RequestFlag
from stallscope.events.trace import Trace

_IN_STATE = 0.2
"""A process is at work, or at a lock, if it spends more than this share of its time so."""

_LONGEST_PAUSES = 3
"""An engine is silent from this many times its longest time without progress on."""

_IDLE = re.compile(
    r"^(epoll_p?wait|p?poll|p?select|accept4?)\b|/selectors\.py:|/asyncio/|/socketserver\.py:|/queue\.py:|/anyio/"
    r"|/uvicorn/|/concurrent/futures/thread\.py:|/threading\.py:\d+ (\w+\.)?wait"
    r"|/multiprocessing/(connection|resource_tracker|queues|pool)\.py:"
    r"|/multiprocessing/synchronize\.py:\d+ (\w+\.)?wait"
)
"""Innermost frames of a thread that waits for work."""
_INNER_FRAMES = 4
_SLEEP = re.compile(r"^(clock_)?nanosleep\b")
"""The innermost frame of a thread that sleeps, as a background thread does: another blocked thread is named first."""

_TRANSFER = re.compile(r"^_*(p?readv?|recv\w*|p?writev?|send\w*|connect|wait(4|id|pid))\b")
"""The innermost frame of a thread that waits for another process: this process may be at work."""

_MANY_ANSWERED = 3
"""This number of later requests is answered by an engine that has one dead process."""

_FILE_LOCK = re.compile(r"^(flock|fcntl)\b")

_AT_WORK = (
    *(Category.ON_CPU, Category.WAIT_GPU, Category.DEVICE, Category.IO, Category.PREEMPTED),
    Category.CHILD,  # a compiler, for example
)


@dataclass(frozen=True)
class DeadServer:
    """row: of SERVERS, the last one. pid: the process that holds the requests. stack: innermost frame first."""

    node: int
    pid: int
    row: Array
    since_ns: int
    waited_ns: int
    cause: str
    stack: tuple[str, ...]


def dead_servers(trace: Trace, node: int, pids: tuple[int, ...], limits: Thresholds) -> DeadServer | None:
    """The engine with these processes, if it is dead at the end of the trace."""
    rows = trace.servers[(trace.servers["node"] == node) & np.isin(trace.servers["pid"], pids)]
    last_ns = int(rows["ts_ns"].max())
    is_stuck = (rows["ts_ns"] == last_ns) & (rows["n_open"] > rows["n_full"]) & (rows["oldest_ns"] != UNKNOWN)
    if not is_stuck.any() or _end_ns(trace, node) - last_ns > limits.dead_server_ns:
        return None
    stuck = rows[is_stuck]
    row = stuck[stuck["oldest_progress_ns"].argmin()]
    own = trace.requests[(trace.requests["node"] == node) & np.isin(trace.requests["pid"], pids)]
    same = own[own["path"] == row["oldest_path"]]
    since_ns = _waiting_since_ns(same, row, progress_ns=int(stuck["progress_ns"].max()))
    if last_ns - since_ns >= max(limits.dead_server_ns, _LONGEST_PAUSES * _longest_ns(same)):
        return _held(trace, node, pids, row, since_ns, last_ns)
    return _dead_process(trace, pids, own, stuck, limits)


def _dead_process(
    trace: Trace, pids: tuple[int, ...], requests: Array, stuck: Array, limits: Thresholds
) -> DeadServer | None:
    """A dead process of an engine whose other processes answer requests. stuck: rows of SERVERS of one moment."""
    connected = {*requests["pid"].tolist(), *stuck["pid"].tolist()}
    workers = [pid for pid in pids if pid not in connected]
    for row in stuck[np.argsort(stuck["oldest_progress_ns"], kind="stable")]:
        same = requests[requests["path"] == row["oldest_path"]]
        own = same[same["pid"] == row["pid"]]
        own_since_ns = _waiting_since_ns(own, row, progress_ns=int(row["progress_ns"]))
        suspects = {int(row["pid"]): own_since_ns}
        if len(workers) > 1:
            suspects |= dict.fromkeys(workers, int(row["oldest_progress_ns"]))
        for pid, since_ns in suspects.items():
            last_ns = int(row["ts_ns"])
            is_answered = (same["ts_ns"] > since_ns) & (same["first_ns"] != UNKNOWN)
            if (
                last_ns - since_ns < max(limits.dead_server_ns, _LONGEST_PAUSES * _longest_ns(same))
                or is_answered.sum() < _MANY_ANSWERED
            ):
                continue
            dead = _held(trace, int(row["node"]), (pid,), row, since_ns, last_ns)
            if dead and (dead.cause == "process_stopped" or _is_blocked(trace, dead)):
                return dead
    return None


def _is_blocked(trace: Trace, dead: DeadServer) -> bool:
    """Whether the process waited for a lock, in Python code that does not wait for a network or a pipe."""
    states = trace.snapshots[
        (trace.snapshots["node"] == dead.node) & (trace.snapshots["ts_ns"] >= dead.since_ns)
    ]
    is_at_lock = _share(states, dead.pid, (Category.LOCK, Category.OTHER_OFF)) > _IN_STATE
    return is_at_lock and is_python(user_line(dead.stack)) and not _TRANSFER.search(dead.stack[0])


def _waiting_since_ns(requests: Array, row: Array, *, progress_ns: int) -> int:
    """Since when requests wait and none makes progress. requests: ended requests of the path. row: open requests.

    A client that gives up and tries again is not progress. progress_ns: of open requests of any path.
    """
    is_answered = (requests["first_ns"] != UNKNOWN) | (
        (requests["status"] != UNKNOWN) & (requests["flags"] & RequestFlag.ABORTED == 0)
    )
    last_ns = max(int(requests["last_ns"][is_answered].max(initial=UNKNOWN)), progress_ns)
    given_up = requests[~is_answered & (requests["end_ns"] > last_ns)]
    arrival_ns = min(int(given_up["ts_ns"].min(initial=int(row["oldest_ns"]))), int(row["oldest_ns"]))
    return max(last_ns, arrival_ns)


def _held(
    trace: Trace, node: int, pids: tuple[int, ...], row: Array, since_ns: int, last_ns: int
) -> DeadServer | None:
    states = trace.snapshots[(trace.snapshots["node"] == node) & np.isin(trace.snapshots["pid"], pids)]
    spent = states[states["ts_ns"] >= since_ns]
    stopped = [pid for pid in pids if _share(spent, pid, (Category.STOPPED,)) > 0.5]
    waited_ns = last_ns - since_ns
    if stopped:
        return DeadServer(node, stopped[0], row, since_ns, waited_ns, "process_stopped", ())
    if any(_share(spent, pid, _AT_WORK) > _IN_STATE for pid in pids):
        return None
    pid, stack = _blocked_at(trace, node, pids, since_ns) or (int(row["pid"]), ())
    return DeadServer(node, pid, row, since_ns, waited_ns, _cause_of(stack), stack)


def _cause_of(stack: tuple[str, ...]) -> str:
    """The cause of a thread that is blocked at this stack."""
    if stack and _FILE_LOCK.match(stack[0]):
        return "file_lock"
    return "lock_contention" if any(LOCKS.search(frame) for frame in stack) else "blocked"


def _longest_ns(requests: Array) -> int:
    """The longest time without progress in requests that were answered."""
    answered = requests[requests["first_ns"] != UNKNOWN]
    if not len(answered):
        return 0
    return int(np.maximum(answered["first_ns"] - answered["ts_ns"], answered["gap_ns"]).max())


def _share(states: Array, pid: int, categories: tuple[Category, ...]) -> float:
    """Share of its time that a process spent in these categories of the ledger."""
    rows = states[states["pid"] == pid]
    if len(rows) < 2:
        return 0.0
    spent = rows["ledger_ns"][-1] - rows["ledger_ns"][0]
    return float(spent[[category - 1 for category in categories]].sum() / max(spent.sum(), 1))


def _blocked_at(
    trace: Trace, node: int, pids: tuple[int, ...], since_ns: int
) -> tuple[int, tuple[str, ...]] | None:
    """Process and stack of the thread that is blocked in the user's code; a thread that waits for work is not."""
    rows = trace.positions
    rows = rows[(rows["node"] == node) & np.isin(rows["pid"], pids) & (rows["ts_ns"] >= since_ns)]
    samples: dict[tuple[int, tuple[str, ...]], Counter[int]] = {}
    for row in rows:
        if frames := trace.stacks.get(int(row["stack"]), ()):
            samples.setdefault((int(row["pid"]), frames), Counter())[int(row["tid"])] += 1
    blocked = [key for key in samples if not any(_IDLE.search(frame) for frame in key[1][:_INNER_FRAMES])]
    # In an engine with Python code, native threads wait for this code.
    # Threads that wait for a lock are many and in one function; the thread that has the lock is alone in its function.
    lines = {key: user_line(key[1]) for key in blocked}
    tids: dict[tuple[str, str], set[int]] = {}
    for key, line in lines.items():
        tids.setdefault(function(line), set()).update(samples[key])
    ranked = sorted(
        blocked,
        key=lambda key: (
            bool(_SLEEP.match(key[1][0])),
            not is_python(lines[key]),
            not _is_in_function(lines[key]),
            len(tids[function(lines[key])]),
            -samples[key].total(),
        ),
    )
    return ranked[0] if ranked else None


def _is_in_function(line: str) -> bool:
    """Whether a line of code is in a function, and not at the module level of the program."""
    return not line.endswith(("<module>", " main"))


def _end_ns(trace: Trace, node: int) -> int:
    """The last moment of the capture."""
    states = trace.snapshots["ts_ns"][trace.snapshots["node"] == node]
    return max(int(states.max(initial=0)), trace.ends_ns[node] if node < len(trace.ends_ns) else 0)
