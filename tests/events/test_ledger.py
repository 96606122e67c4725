"""The ledger from raw events, against a stopwatch that looks at every moment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.events.ledger import ThreadEvents, account, combine, states_of, waits_or_device
from stallscope.events.names import N_CATEGORIES, Category

OPEN = 1 << 62
CALLS = (Category.WAIT_GPU, Category.DEVICE, Category.ALLOC, Category.COPY)
REASONS = (Category.LOCK, Category.SLEEP, Category.IO, Category.NET, Category.PREEMPTED, Category.STOPPED)


def thread(calls=(), offs=(), *, first_ns=0, last_ns=OPEN) -> ThreadEvents:
    """calls: (enter, leave, category). offs: (off, woken, on, category)."""
    call, off = (np.array(rows, np.int64).reshape(-1, n) for rows, n in ((calls, 3), (offs, 4)))
    return ThreadEvents(*call.T, off[:, 0], off[:, 2], off[:, 1], off[:, 3], first_ns, last_ns)


def spent(threads, at_ns) -> dict[str, int]:
    """Time by category at one moment, without zeros."""
    ledger = account(threads, np.array([at_ns]))[0]
    return {Category(i + 1).name: int(ns) for i, ns in enumerate(ledger) if ns}


def state_at(thread_events: ThreadEvents, moment: int) -> int:
    """The state of a thread at a moment, from its events one by one."""
    if not thread_events.first_ns <= moment < thread_events.last_ns:
        return 0
    off = 0
    for begin, woken, end, reason in zip(
        thread_events.off_ns,
        thread_events.woken_ns,
        thread_events.on_ns,
        thread_events.off_category,
        strict=True,
    ):
        if begin <= moment < woken:
            off = int(reason)
        elif woken <= moment < end:
            off = int(Category.PREEMPTED)
    if off in (Category.PREEMPTED, Category.STOPPED):
        return off
    for enter, leave, category in zip(
        thread_events.call_enter_ns, thread_events.call_leave_ns, thread_events.call_category, strict=True
    ):
        if enter <= moment < leave:
            return int(category)
    return off or int(Category.ON_CPU)


@st.composite
def threads(draw) -> ThreadEvents:
    def apart(n_values, kinds, width):
        times = sorted(draw(st.lists(st.integers(0, 60), min_size=0, max_size=n_values * 4, unique=True)))
        times = times[: len(times) // width * width]
        groups = [times[i : i + width] for i in range(0, len(times), width)]
        return [(*group, int(draw(st.sampled_from(kinds)))) for group in groups]

    first = draw(st.integers(0, 20))
    last = draw(st.one_of(st.just(OPEN), st.integers(first + 1, 70)))
    calls = apart(2, CALLS, 2)
    if calls and draw(st.booleans()):
        calls[-1] = (calls[-1][0], OPEN, calls[-1][2])
    return thread(calls, apart(3, REASONS, 3), first_ns=first, last_ns=last)


@settings(max_examples=150)
@given(st.lists(threads(), min_size=1, max_size=3), st.lists(st.integers(0, 80), min_size=1, max_size=4))
def test_the_ledger_matches_a_stopwatch(parts, moments):
    at = np.array(sorted(moments))
    result = account(parts, at)
    for row, moment in zip(result, at.tolist(), strict=True):
        wanted = np.zeros(N_CATEGORIES + 1, np.int64)
        for t in range(moment):
            wanted[max(state_at(part, t) for part in parts)] += 1
        np.testing.assert_array_equal(row, wanted[1:])


@settings(max_examples=60)
@given(st.lists(threads(), min_size=1, max_size=3), st.integers(21, 69))
def test_accounts_fill_the_time_and_only_grow(parts, moment):
    lasting = [thread(one_calls(part), one_offs(part), first_ns=part.first_ns) for part in parts]
    begin = min(part.first_ns for part in lasting)
    at = np.arange(begin, begin + moment)
    result = account(lasting, at)
    np.testing.assert_array_equal(result.sum(axis=1), at - begin)
    assert (np.diff(result, axis=0) >= 0).all()


def one_calls(entry):
    return list(zip(entry.call_enter_ns, entry.call_leave_ns, entry.call_category, strict=True))


def one_offs(entry):
    return list(zip(entry.off_ns, entry.woken_ns, entry.on_ns, entry.off_category, strict=True))


def test_open_intervals_are_charged_up_to_the_moment():
    blocked = thread(offs=[(10, OPEN, OPEN, Category.IO)])
    assert spent([blocked], 25) == {"ON_CPU": 10, "IO": 15}
    calling = thread(calls=[(10, OPEN, Category.WAIT_GPU)])
    assert spent([calling], 25) == {"ON_CPU": 10, "WAIT_GPU": 15}


def test_the_call_counts_before_the_reason_of_being_blocked():
    entry = thread([(10, 50, Category.WAIT_GPU)], [(20, 40, 40, Category.LOCK)])
    assert spent([entry], 60) == {"ON_CPU": 20, "WAIT_GPU": 40}


def test_preempted_and_stopped_count_also_inside_a_call():
    for reason in (Category.PREEMPTED, Category.STOPPED):
        entry = thread([(10, 50, Category.ALLOC)], [(20, 40, 40, reason)])
        assert spent([entry], 60) == {"ON_CPU": 20, "ALLOC": 20, reason.name: 20}


def test_woken_and_not_yet_running_is_preempted():
    assert spent([thread(offs=[(10, 30, 45, Category.SLEEP)])], 60) == {
        "ON_CPU": 25,
        "SLEEP": 20,
        "PREEMPTED": 15,
    }


def test_a_process_is_in_the_state_of_its_most_active_thread():
    waiting = thread([(0, 100, Category.WAIT_GPU)])
    helper = thread(offs=[(0, 40, 40, Category.LOCK), (60, 100, 100, Category.LOCK)])
    assert spent([waiting, helper], 100) == {"WAIT_GPU": 80, "ON_CPU": 20}


@pytest.mark.parametrize(
    "parked", [Category.LOCK, Category.NET, Category.SLEEP, Category.OTHER_OFF, Category.CHILD]
)
def test_a_parked_thread_does_not_hide_a_wait(parked):
    waiting = thread([(0, 40, Category.WAIT_GPU)])
    assert spent([waiting, thread(offs=[(0, 99, 99, parked)])], 40) == {"WAIT_GPU": 40}


def test_two_threads_that_hand_over_are_one_account():
    """While the main thread waits in a futex for the worker, the time is the worker's."""
    main = thread(offs=[(10, 60, 60, Category.LOCK)])
    worker = thread([(30, 50, Category.COPY)], [(0, 10, 10, Category.LOCK), (60, 100, 100, Category.LOCK)])
    assert spent([main, worker], 100) == {"ON_CPU": 80, "COPY": 20}


def test_the_end_of_a_thread_ends_its_account():
    assert spent([thread(last_ns=30)], 100) == {"ON_CPU": 30}


def test_without_threads_or_times_the_ledger_is_empty():
    assert account([], np.array([5])).sum() == 0
    assert account([thread()], np.zeros(0, np.int64)).shape == (0, N_CATEGORIES)


def test_edges_are_the_times_of_state_changes():
    edges, states = states_of(thread([(10, 20, Category.COPY)], first_ns=0, last_ns=50))
    output = dict(zip(edges.tolist(), states.tolist(), strict=True))
    assert output == {0: Category.ON_CPU, 10: Category.COPY, 20: Category.ON_CPU, 50: Category.NONE}
    both, _ = combine([(edges, states), (np.array([15]), np.array([int(Category.LOCK)]))])
    assert both.tolist() == [0, 10, 15, 20, 50]


@pytest.mark.parametrize(
    ("syncs", "enqueued", "wanted"),
    [
        ([(10, 20)], [5], ["WAIT_GPU"]),
        ([(10, 20)], [], ["DEVICE"]),
        ([(10, 20), (30, 40)], [5], ["WAIT_GPU", "DEVICE"]),
        ([(10, 20), (30, 40)], [5, 25], ["WAIT_GPU", "WAIT_GPU"]),
        ([(10, 40), (20, 30)], [5], ["WAIT_GPU", "DEVICE"]),
        ([(10, 20)], [15], ["DEVICE"]),
        ([(10, 40), (30, 35), (50, 60)], [5, 32], ["WAIT_GPU", "DEVICE", "DEVICE"]),
    ],
)
def test_a_synchronise_call_is_a_wait_only_after_a_new_collective(syncs, enqueued, wanted):
    enter, leave = np.array(syncs, np.int64).T
    result = waits_or_device(enter, leave, np.array(enqueued, np.int64))
    assert [Category(category).name for category in result.tolist()] == wanted
