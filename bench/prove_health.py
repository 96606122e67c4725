"""16 emulated machines of one job in simulated time: how soon a slow machine is named, and how often a healthy one.

Slow machines are slow from the first collective, so that their own history looks normal, or become slow at a known
time. Healthy machines differ in speed, have noise, pauses of up to 6 s, phases of all machines, and lose 1 % of their
reports, for two hours. `make prove-health` runs this; the results go to results/health.json.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

from report import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.health.emulated import Fault, Jitter, Job

from stallscope.health import WINDOW_S
from stallscope.health.signals import SIGNALS
from stallscope.health.windows import WARM_UP_WINDOWS

MAX_S = 30.0
HOURS = 2.0
N_SEEDS = 5
ONSET_S = 300.0
JITTER = Jitter(speed=0.02, noise=0.03, pause_every_s=300, lost=0.01, changes_phase=True)
FROM_THE_START = {
    "20 % slower host": Fault(slowness=lambda at_s: 1.25),
    "30 % of the time preempted": Fault(preempted=0.3),
    "GPU clock 20 % lower": Fault(clock=0.8),
    "3 % of the memory available": Fault(available=0.03),
}
FROM_ONSET = {"20 % slower host": Fault(slowness=lambda at_s: 1.25 if at_s >= ONSET_S else 1.0)}


def main() -> None:
    """Measure, report, and fail beyond a limit."""
    names = [*FROM_THE_START, *(f"{name}, after 300 s" for name in FROM_ONSET)]
    cases = [*((fault, WARM_UP_WINDOWS * WINDOW_S) for fault in FROM_THE_START.values())]
    cases += [(fault, ONSET_S) for fault in FROM_ONSET.values()]
    named = {
        name: [naming(fault, begin_s, seed) for seed in range(N_SEEDS)]
        for name, (fault, begin_s) in zip(names, cases, strict=True)
    }
    false, n_windows = false_stragglers()
    slowest_s = max(each["named_after_s"] for runs in named.values() for each in runs)
    n_others = sum(each["n_others"] for runs in named.values() for each in runs)
    is_hidden = all(each["is_normal_in_own_history"] for name in FROM_THE_START for each in named[name])
    report(
        "health",
        {
            "n_machines": 16,
            "n_runs_of_each_fault": N_SEEDS,
            "named_after_s": {
                name: {
                    "median": round(median(each["named_after_s"] for each in runs), 1),
                    "max": round(max(each["named_after_s"] for each in runs), 1),
                }
                for name, runs in named.items()
            },
            "is_normal_in_own_history": is_hidden,
            "n_healthy_machines_named_with_them": n_others,
            "healthy_hours": HOURS,
            "n_healthy_windows": n_windows,
            "n_false_stragglers": false,
        },
    )
    if slowest_s >= MAX_S or n_others or false or not is_hidden:
        sys.exit(f"slowest {slowest_s:.0f} s, {n_others + false} healthy machines named")


def naming(fault: Fault, begin_s: float, seed: int) -> dict[str, float]:
    """The time from begin_s until machine 5 is a straggler, in a job with jitter."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), seed=seed, jitter=JITTER, faults={5: fault})
        slow = job.machines[5]
        named_s = next(
            (at_s for at_s in job.run(begin_s + 120) if slow.state.state == "straggler"), float("inf")
        )
        others = [each for each in job.machines if each is not slow and each.state.state == "straggler"]
        signal = slow.state.reason.partition(" ")[0]
        own = [each[signal] for each in slow.signals]
        is_normal = min(own) > median(own) * (1 - SIGNALS[signal].floor)
        return {
            "named_after_s": named_s - begin_s,
            "n_others": len(others),
            "is_normal_in_own_history": is_normal,
        }


def false_stragglers() -> tuple[int, int]:
    """Machines that were named in two hours without a fault, and the number of windows."""
    with tempfile.TemporaryDirectory() as folder:
        job, named, before = Job(Path(folder), seed=99, jitter=JITTER), 0, set[str]()
        for _ in job.run(HOURS * 3600):
            now = {each.name for each in job.machines if each.state.state == "straggler"}
            named, before = named + len(now - before), now
        return named, sum(len(each.signals) for each in job.machines)


if __name__ == "__main__":
    main()
