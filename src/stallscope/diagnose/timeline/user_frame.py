"""The location of a thread in the user's code: the frame of a stack that helps the author of the program most.

A stack is a list of frames as text, innermost first: native frames, "poll+0x4f (libc.so.6)", then Python frames,
"train.py:88 load_batch". Installed code (site-packages, the standard library, the system's and NVIDIA's libraries)
seldom helps. The innermost frame of the program's own code does, if there is such a frame.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.names import Category
from stallscope.events.trace import Trace

_FRAME = re.compile(r"^(?P<file>.+):(?P<line>\d+|\?) (?P<function>.+)$")
_INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen ")
_NATIVE = re.compile(r"^(?P<function>\S+) \((?P<file>[^()]+)\)$")
_SYSTEM_LIBRARY = re.compile(
    r"^(lib(c|pthread|dl|m|rt|gcc_s|stdc\+\+|ffi|cuda|cudart|nccl|nvidia)\b|ld-linux|_ctypes\.)"
)
_IDLE = re.compile(r"/threading\.py:\d+ (\w+\.)?(wait|_bootstrap|_bootstrap_inner|run)$")
_WAITS_FOR_WORK = re.compile(r"^(_*pthread_cond_(timed|clock)?wait|_ZNSt18condition_variable)")
"""Innermost frames of an idle thread without Python frames, such as PyTorch's backward thread between two passes. That
thread makes the collectives.
"""


def in_own_code(frames: Sequence[str]) -> str:
    """The innermost frame of the program's own code; otherwise the innermost Python frame, or the innermost frame."""
    python = in_python(frames)
    own = [frame for frame in python if not _INSTALLED.search(frame)]
    native = [
        frame
        for frame in frames
        if (match := _NATIVE.match(frame)) and not _SYSTEM_LIBRARY.search(match["file"])
    ]
    return (own or python or native or list(frames) or [""])[0]


def in_python(frames: Sequence[str]) -> list[str]:
    """The Python frames of a stack."""
    return [frame for frame in frames if not _NATIVE.match(frame) and _FRAME.match(frame)]


def held_at(trace: Trace, node: int, pid: int, *, categories: Sequence[int]) -> tuple[str, ...]:
    """The stack in which a process was off the CPU the longest, in intervals of these categories.

    Empty unless it has more than half of their time. Locks are left out: idle threads wait in them.
    """
    wanted = [category for category in categories if category != Category.LOCK]
    rows = trace.offcpu
    rows = rows[(rows["node"] == node) & (rows["pid"] == pid) & np.isin(rows["category"], wanted)]
    ns: Counter[int] = Counter()
    for stack, duration_ns in zip(rows["stack"].tolist(), rows["duration_ns"].tolist(), strict=True):
        ns[stack] += max(duration_ns, 0)
    by_location: Counter[tuple[str, ...]] = Counter()
    for stack, stack_ns in ns.items():
        by_location[_location(trace, stack)] += stack_ns
    for location, longest_ns in by_location.most_common(1):
        if 2 * longest_ns > ns.total():
            stacks = [stack for stack, _ in ns.most_common() if _location(trace, stack) == location]
            return trace.stacks.get(stacks[0], ())
    return ()


def _location(trace: Trace, stack: int) -> tuple[str, ...]:
    """The Python frames of a stack, or all frames without any: some events have no native frames."""
    frames = trace.stacks.get(stack, ())
    return tuple(in_python(frames)) or frames


def last_position(trace: Trace, timeline: Timeline, process: int) -> tuple[str, ...]:
    """The newest sampled stack of a process: of the thread that makes its collectives, or of its main thread if that
    thread waits for work. Empty without a sample since the last arrival.
    """
    rows = trace.positions
    rows = rows[(rows["pid"] == timeline.pid[process]) & (rows["node"] == timeline.node[process])]
    arrivals = timeline.rows[timeline.first[process] : timeline.first[process + 1]]
    if len(arrivals):
        rows = rows[rows["ts_ns"] > arrivals["ts_ns"].max()]
    if not len(rows):
        return ()
    newest = rows[rows["ts_ns"] == rows["ts_ns"].max()]
    by_tid = {int(row["tid"]): trace.stacks.get(int(row["stack"]), ()) for row in newest}
    caller = int(arrivals["tid"][np.argmax(arrivals["ts_ns"])]) if len(arrivals) else -1
    for tid in (caller, int(timeline.pid[process]), *by_tid):
        frames = by_tid.get(tid, ())
        if frames and not _is_idle(frames):
            return frames
    return ()


def _is_idle(frames: Sequence[str]) -> bool:
    """Whether a thread with this stack is idle."""
    if python := in_python(frames):
        return bool(_IDLE.search(python[0]))
    return any(_WAITS_FOR_WORK.match(frame) for frame in frames)
