"""A check of the probes' governor while the probes are hit rarely, with the sum over all threads and thread by thread.

The governor checks five times a second. 8 processes with 8 followed threads each. Needs no root: the kernel's map is an
array here, and reading it costs the same for both.
"""

import time
from collections.abc import Callable

import numpy as np
from report import report

from stallscope.capture.probes.governor import COST_RATIO, Group, counts_by_group
from stallscope.capture.probes.maps import Entries
from stallscope.capture.probes.operations import BUDGETED
from stallscope.events import kernel
from stallscope.events.kernel import HookGroup

_N_PROCESSES = 8
_N_CHECKS = 1_000
_CHECKS_PER_S = 5


def main() -> None:
    """Measure and report."""
    rows = np.zeros(_N_PROCESSES, kernel.PROCESS)
    slots = rows["slots"]
    slots["tid"] = 1 + np.arange(slots.size).reshape(slots.shape)
    entries = Entries(np.arange(_N_PROCESSES, dtype=np.uint32), rows)
    states = {group: Group() for group in (HookGroup.ALWAYS, *BUDGETED)}

    def thread_by_thread() -> None:
        for group, counts in counts_by_group(entries, list(states)).items():
            states[group].add_counts(counts, time.monotonic_ns(), cost_ratio=COST_RATIO)

    each_us = _cpu_us(thread_by_thread)
    sum_us = _cpu_us(lambda: slots["way_ns"].sum(axis=(0, 1), dtype=np.int64))
    report(
        "governor",
        {
            "n_threads": slots.size,
            "thread_by_thread_us": round(each_us, 1),
            "sum_us": round(sum_us, 1),
            "saved_percent_of_a_core": round((each_us - sum_us) * _CHECKS_PER_S / 1e4, 3),
        },
    )


def _cpu_us(check: Callable[[], object]) -> float:
    check()
    begin_s = time.process_time()
    for _ in range(_N_CHECKS):
        check()
    return (time.process_time() - begin_s) / _N_CHECKS * 1e6


if __name__ == "__main__":
    main()
