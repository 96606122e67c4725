"""Calls on all cores: each is made once, also within other calls and while all threads are busy."""

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from stallscope.diagnose.arrays import parallel


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_n_cores", lambda: 2)


def test_every_piece_is_worked_on_once():
    n_times = np.zeros(10_007, np.int64)

    def work(here: slice) -> None:
        n_times[here] += 1

    for is_much in (False, True):
        parallel.in_pieces(len(n_times), work, rows_at_once=64, is_much=is_much)
    assert (n_times == 2).all()


def test_calls_within_calls_end_while_other_threads_do_the_same():
    n_calls: Counter[int] = Counter()

    def inner(number: int) -> int:
        n_calls[number] += 1
        return number

    def outer(number: int) -> tuple[int, int]:
        parallel.together([lambda: parallel.both(lambda: inner(number), lambda: 0, n=parallel.MUCH)] * 4)
        return parallel.both(lambda: inner(number), lambda: -number, n=parallel.MUCH)

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(outer, range(50)))
    assert results == [(number, -number) for number in range(50)]
    assert n_calls == dict.fromkeys(range(50), 5)


def test_the_first_failure_is_raised_after_all_calls_have_ended():
    n_ended = threading.Semaphore(0)

    def failing() -> None:
        raise ZeroDivisionError

    def late_failure() -> None:
        raise KeyError

    with pytest.raises(ZeroDivisionError):
        parallel.together([n_ended.release, failing, n_ended.release, late_failure, n_ended.release])
    assert all(n_ended.acquire(blocking=False) for _ in range(3))
    for first, second in ((failing, n_ended.release), (n_ended.release, failing)):
        with pytest.raises(ZeroDivisionError):
            parallel.both(first, second, n=parallel.MUCH)


def test_a_forked_process_has_threads_of_its_own():
    parallel.together([lambda: None] * 2)
    pid = os.fork()
    if not pid:
        done: list[int] = []
        parallel.together([lambda: done.append(1)] * 4)
        os._exit(0 if len(done) == 4 else 1)
    assert os.waitpid(pid, 0)[1] == 0
