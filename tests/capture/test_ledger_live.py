"""The kernel's ledger on real processes: against the threads' own CPU clocks, against raw events, by phase."""

from collections.abc import Callable

import numpy as np
import pytest

from stallscope.capture.probes.program import MODES, Program
from stallscope.capture.rows import records
from stallscope.events import kernel
from stallscope.events.names import CATEGORY_NAMES, Category, CollectiveFlag

from . import ledger_oracle

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

MS = 1_000_000
NOISE = ("preempted", "on_cpu")
"""The effect of a busy machine on any phase."""


@pytest.mark.parametrize(("nap_us", "hog"), [("0", "1"), ("300", "2"), ("0", "0")])
def test_on_cpu_time_matches_the_thread_cpu_clock(
    tracing: Callable[..., Program], run, nap_us: str, hog: str
):
    done = run(tracing(), "busy", "60", "10", nap_us, hog)
    spent = done.arrivals["ledger_ns"][1::2] - done.arrivals["ledger_ns"][0::2]
    cpu_ns = np.array([int(cpu) for _, cpu in done.lines])
    error_ns = np.abs(spent[:, Category.ON_CPU - 1] - cpu_ns)
    assert len(cpu_ns) == 60
    assert (error_ns <= np.maximum(MS, cpu_ns // 100)).all(), (error_ns.max(), done.losses)
    assert (spent.sum(axis=1) == done.arrivals["ts_ns"][1::2] - done.arrivals["ts_ns"][0::2]).all()


def test_each_phase_is_charged_to_its_category(tracing: Callable[..., Program], run):
    done = run(tracing(), "phases", "3")
    wrong: dict[str, list[str]] = {}
    for line in done.lines:
        wrong.setdefault(line[0], []).append(_misjudged(done, line))
    assert len(done.lines) == 3 * 24 and len(wrong) == 24
    # A busy machine can disturb a phase; a wrong account is wrong each time.
    assert not [output for output in wrong.values() if all(output)]


@pytest.mark.parametrize("mode", MODES)
def test_the_ledger_matches_the_sum_of_raw_events(tracing: Callable[..., Program], run, mode: str):
    functions = (
        "ncclAllReduce",
        "cudaFree",
        "cudaMalloc",
        "cudaMemcpy",
        "cudaStreamSynchronize",
    )  # of phases.c
    program = tracing(record_all=True, modes=(mode,), only=functions)
    done = run(program, "phases", "3")
    at_ns = done.arrivals["ts_ns"]
    expected = ledger_oracle.accounts(records.raw(done.events), done.pid, at_ns)
    per_interval = np.diff(done.arrivals["ledger_ns"], axis=0) - np.diff(expected, axis=0)
    allowed = np.maximum(MS, np.diff(at_ns) // 50)
    is_wrong = np.abs(per_interval).max(axis=1) > allowed
    assert program.mode == mode
    assert not any(n for name, n in done.losses.items() if name.startswith("lost"))
    # What a hypervisor steals is known afterwards only, and may fall on the wrong side of an arrival: not each time.
    assert not is_wrong.reshape(3, -1).all(axis=0).any()
    assert (
        done.arrivals["ledger_ns"].sum(axis=1) - at_ns == done.arrivals["ledger_ns"][0].sum() - at_ns[0]
    ).all()


def _misjudged(expected_rows, line: list[str]) -> str:
    """The error in a phase's account; empty if it is right."""
    name, begin_ns, end_ns, *parts = line
    first = np.searchsorted(expected_rows.arrivals["ts_ns"], int(begin_ns), side="right") - 1
    last = np.searchsorted(expected_rows.arrivals["ts_ns"], int(end_ns))
    if (
        expected_rows.arrivals["flags"][[first, last]] & (CollectiveFlag.TORN | CollectiveFlag.THREADS_LOST)
    ).any():
        return f"{name}: flags {expected_rows.arrivals['flags'][[first, last]]}"
    rows = expected_rows.arrivals["ledger_ns"]
    spent = dict(zip(CATEGORY_NAMES, (rows[last] - rows[first]).tolist(), strict=True))
    wanted = {category: int(ns) for category, ns in (part.split("=") for part in parts)}
    noise = spent["preempted"] if "preempted" not in wanted else 0
    for category, ns in wanted.items():
        if category not in NOISE and spent[category] < ns - noise - ns // 10 - MS:
            return f"{name}: {category} {spent[category] / MS:.2f} ms, not {ns / MS:.2f}; {spent}"
    rest = sum(ns for category, ns in spent.items() if category not in (*wanted, *NOISE))
    if rest > 2 * MS + noise // 2:
        return f"{name}: {rest / MS:.2f} ms elsewhere; {spent}"
    return ""


@pytest.mark.parametrize("n_threads", ["3", "7", "12"])
def test_accounts_fill_the_time_while_many_threads_change_them(
    tracing: Callable[..., Program], run, n_threads: str
):
    done = run(tracing(), "crowd", n_threads, "2")
    arrivals = done.arrivals
    spent = np.diff(arrivals["ledger_ns"], axis=0)
    is_torn = (arrivals["flags"] & CollectiveFlag.TORN) > 0
    is_whole = ~(is_torn[1:] | is_torn[:-1])
    assert len(arrivals) > 100 and is_whole.mean() > 0.9
    assert (spent.sum(axis=1) == np.diff(arrivals["ts_ns"]))[is_whole].all()
    assert spent[is_whole].min() > -MS
    assert np.abs(arrivals["ledger_ns"]).max() < np.diff(arrivals["ts_ns"][[0, -1]])[0] + 1000 * MS
    assert done.losses["lost_change"] == 0
    n_all = int(n_threads) + 1  # each is counted once at most, also one that had a slot before
    assert done.losses["lost_thread"] <= (n_all if n_all > kernel.N_SLOTS else 0)
