"""Where in the code a thread is: which frame of a stack says most to who wrote the program.

A stack is frames in words, innermost first: native ones, "poll+0x4f (libc.so.6)", then Python's, "train.py:88
load_batch". What is installed (site-packages, the standard library, the system's and NVIDIA's libraries) is seldom the
answer: the innermost frame of the program's own code is, where there is one.
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
_OF_THE_SYSTEM = re.compile(
    r"^(lib(c|pthread|dl|m|rt|gcc_s|stdc\+\+|ffi|cuda|cudart|nccl|nvidia)\b|ld-linux|_ctypes\.)"
)
_IDLE = re.compile(r"/threading\.py:\d+ (\w+\.)?(wait|_bootstrap|_bootstrap_inner|run)$")
_WAITS_FOR_WORK = re.compile(r"^(_*pthread_cond_(timed|clock)?wait|_ZNSt18condition_variable)")
"""Of a thread without Python frames, such as the one in which PyTorch runs the backward pass: it stands here between
two passes, and it is the one that makes the collectives.
"""


def in_own_code(frames: Sequence[str]) -> str:
    """The innermost frame of the program's own code, else the innermost Python frame, else the innermost."""
    python = in_python(frames)
    own = [frame for frame in python if not _INSTALLED.search(frame)]
    native = [
        frame
        for frame in frames
        if (found := _NATIVE.match(frame)) and not _OF_THE_SYSTEM.search(found["file"])
    ]
    return (own or python or native or list(frames) or [""])[0]


def in_python(frames: Sequence[str]) -> list[str]:
    """The Python frames of a stack."""
    return [frame for frame in frames if not _NATIVE.match(frame) and _FRAME.match(frame)]


def held_at(trace: Trace, node: int, pid: int, *, categories: Sequence[int]) -> tuple[str, ...]:
    """The stack in which a process was off the CPU the longest, of those intervals that are of these categories.

    Empty unless it has more than half of their time. Locks are left out: threads that have nothing to do wait in them.
    """
    wanted = [category for category in categories if category != Category.LOCK]
    rows = trace.offcpu
    rows = rows[(rows["node"] == node) & (rows["pid"] == pid) & np.isin(rows["category"], wanted)]
    ns: Counter[int] = Counter()
    for stack, duration_ns in zip(rows["stack"].tolist(), rows["duration_ns"].tolist(), strict=True):
        ns[stack] += max(duration_ns, 0)
    alike: Counter[tuple[str, ...]] = Counter()
    for stack, stack_ns in ns.items():
        alike[_place(trace, stack)] += stack_ns
    for place, longest_ns in alike.most_common(1):
        if 2 * longest_ns > ns.total():
            here = [stack for stack, _ in ns.most_common() if _place(trace, stack) == place]
            return trace.stacks.get(here[0], ())
    return ()


def _place(trace: Trace, stack: int) -> tuple[str, ...]:
    """What two stacks share that differ in native frames only: some events have none."""
    frames = trace.stacks.get(stack, ())
    return tuple(in_python(frames)) or frames


def last_position(trace: Trace, line: Timeline, process: int) -> tuple[str, ...]:
    """The stack of a process when it was last looked at: of the thread that makes its collectives, unless that waits
    for work, else of its main thread. Empty where there is none since its last arrival.
    """
    rows = trace.positions
    rows = rows[(rows["pid"] == line.pid[process]) & (rows["node"] == line.node[process])]
    arrivals = line.rows[line.first[process] : line.first[process + 1]]
    if len(arrivals):
        rows = rows[rows["ts_ns"] > arrivals["ts_ns"].max()]
    if not len(rows):
        return ()
    newest = rows[rows["ts_ns"] == rows["ts_ns"].max()]
    by_tid = {int(row["tid"]): trace.stacks.get(int(row["stack"]), ()) for row in newest}
    caller = int(arrivals["tid"][np.argmax(arrivals["ts_ns"])]) if len(arrivals) else -1
    for tid in (caller, int(line.pid[process]), *by_tid):
        frames = by_tid.get(tid, ())
        if frames and not _is_idle(frames):
            return frames
    return ()


def _is_idle(frames: Sequence[str]) -> bool:
    """Whether a thread that stands here has nothing to do."""
    if python := in_python(frames):
        return bool(_IDLE.search(python[0]))
    return any(_WAITS_FOR_WORK.match(frame) for frame in frames)
