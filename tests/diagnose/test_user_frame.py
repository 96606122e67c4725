"""The frame and the stack that show where a rank was held."""

import numpy as np

from stallscope.diagnose.timeline.user_frame import held_at, in_own_code
from stallscope.events import layout
from stallscope.events.names import Category
from stallscope.events.trace import Trace

LOADER = ("/usr/lib/python3.12/socket.py:7 recv", "/job/train.py:88 load_batch", "/job/train.py:120 main")
IDLE = ("/job/train.py:9 serve",)


def held(*intervals: tuple[int, int, Category, int]) -> Trace:
    """A trace with intervals off the CPU: (process, ns, category, stack)."""
    rows = layout.empty(layout.OFFCPU, len(intervals))
    for row, (pid, ns, category, stack) in zip(rows, intervals, strict=True):
        row["pid"], row["duration_ns"], row["category"], row["stack"] = pid, ns, category, stack
    return Trace(offcpu=np.array(rows), stacks={1: LOADER, 2: IDLE})


def test_application_code_is_preferred_over_installed_packages():
    assert in_own_code(LOADER) == "/job/train.py:88 load_batch"


def test_the_innermost_frame_is_named_without_application_code():
    assert in_own_code(LOADER[:1]) == LOADER[0]
    assert in_own_code(()) == ""


def test_the_stack_with_most_of_the_time_is_returned():
    trace = held((7, 60, Category.SLEEP, 1), (7, 50, Category.SLEEP, 1), (7, 90, Category.SLEEP, 2))
    assert held_at(trace, 0, 7, categories=(Category.SLEEP,)) == LOADER


def test_no_stack_is_returned_without_a_majority_of_the_time():
    trace = held((7, 60, Category.SLEEP, 1), (7, 90, Category.SLEEP, layout.UNKNOWN))
    assert held_at(trace, 0, 7, categories=(Category.SLEEP,)) == ()


def test_other_processes_other_categories_and_locks_have_no_say():
    trace = held((8, 60, Category.SLEEP, 1), (7, 60, Category.NET, 1), (7, 60, Category.LOCK, 2))
    assert held_at(trace, 0, 7, categories=(Category.SLEEP, Category.LOCK)) == ()
