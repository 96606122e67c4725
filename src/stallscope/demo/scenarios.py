"""The scenarios of `stallscope demo`: the fault of each, and the lessons of its diagnosis.

Each scenario runs live (a job on emulated GPUs, traced with eBPF) or in the simulator: `simulated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from stallscope.demo.faults import FAULTS
from stallscope.errors import BadInput
from stallscope.events.trace import Trace

if TYPE_CHECKING:  # only simulated scenarios need the simulator
    from stallscope.synth import Fault


class Scenario(NamedTuple):
    """One entry.

    fault: of the live job, in faults.FAULTS. first_step: of the fault; None: the fault's own first step.
    seconds: of the live job; None: the default. learn: the lessons of the diagnosis, one sentence per line.
    """

    name: str
    meaning: str
    fault: str
    learn: tuple[str, ...]
    first_step: int | None = None
    seconds: float | None = None


SCENARIOS = (
    Scenario(
        "incident",
        "a job runs well, then one rank begins to read from disk",
        "disk",
        (
            "`since` is the moment to look up in the logs: which deployment, mount or program started then?",
            "Every rank's step became slower, but only one rank did more work than before: its time ledger shows `io`.",
            "`cost` is the waiting time of the other ranks; the late rank's own time is not counted twice.",
        ),
        first_step=150,
    ),
    Scenario(
        "cold-start",
        "one rank has long first steps, as with cold caches",
        "cold",
        (
            "First calls are slow in every job: they are reported separately, and no rank is blamed for them.",
            "`Not an alarm` lists the delays that were left out, so that you can judge them yourself.",
            "If each restart costs minutes, warm the caches: every GPU of the job waits for them.",
        ),
        seconds=8.0,
    ),
    Scenario(
        "memcpy-bottleneck",
        "one rank copies from pageable memory to its GPU in each step",
        "copy",
        (
            "The GPU is not slow: the host waits in cudaMemcpy, and arrives late at the all-reduce.",
            "`why` counts the copies and their bytes. Pinned memory and an asynchronous copy remove the wait.",
            "A profile of the waiting ranks would have shown a slow all-reduce, and been wrong.",
        ),
    ),
    Scenario(
        "periodic-spike",
        "one rank sleeps 290 ms every 14 steps",
        "sleep",
        (
            "A delay with a period has a trigger with a period: logging, evaluation, checkpoints, a timer.",
            "An average over all steps hides it; `every 14 steps` is found from the rounds themselves.",
            "The time ledger distinguishes a sleep from a lock, a disk and a socket by the system call.",
        ),
    ),
    Scenario(
        "cpu-contention",
        "other programs compute on the CPU of one rank",
        "cpu-hog",
        (
            "The rank was ready to run but had no CPU: `preempted` comes from the scheduler's own accounting.",
            "`why` names the program that got the CPU. Pin the ranks, or give the other program a limit.",
            "GPU utilisation is then low on every rank; only one rank has a reason.",
        ),
    ),
    Scenario(
        "gpu-steal",
        "another program uses the GPU of one rank by turns",
        "gpu-steal",
        (
            "All hosts arrive in time, so their time ledgers cannot name a rank: the answer states the missing data.",
            "With the GPUs' own times (NCCL profiler plugin) it names the rank: try the same with --no-bpf.",
            "List the processes on the GPU before you blame the fabric.",
        ),
    ),
    Scenario(
        "straggler",
        "the data loader of one rank is late every 10 steps",
        "input",
        (
            "A rank that arrives last, again and again, without having waited for other ranks, is the culprit.",
            "The rank itself was idle: it waited for its child process, the loader. The loader is the cause.",
            "`waiting` lists the victims: their long all-reduces are a symptom.",
        ),
    ),
    Scenario(
        "hang",
        "one rank stops in the middle and never enters another collective",
        "hang",
        (
            "The hanging ranks are not the culprits: the culprit is the rank that has not arrived.",
            "The missing rank's time ledger still runs: the answer shows its current activity.",
            "A hang is reported after 10 s and not at once, so that a long validation is not called a hang.",
        ),
    ),
)


def named(name: str) -> Scenario:
    """The scenario of that name, which may be the name of a fault. Raises BadInput with all names."""
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    if name in by_name:
        return by_name[name]
    if name in FAULTS:
        return Scenario(name, FAULTS[name].meaning, name, ())
    raise BadInput(f"no scenario {name!r}: choose from {', '.join(by_name | FAULTS)}")


def simulated(scenario: Scenario) -> Trace:
    """A trace of the scenario by the simulator. Raises BadInput for a scenario without a simulation."""
    from stallscope.synth import Capture, Job, simulate

    makers = _faults()
    if scenario.fault not in makers:
        raise BadInput(f"scenario {scenario.name!r} cannot be simulated: run it without --no-bpf, as root")
    steps = 400 if scenario.first_step else 80
    trace, _ = simulate(
        Job(dp=4, ranks_per_node=4, steps=steps),
        makers[scenario.fault],
        seed=1,
        capture=Capture(has_gpu_times=scenario.fault == "gpu-steal"),
        has_twin=False,
    )
    return trace


def _faults() -> dict[str, Sequence[Fault]]:
    """The simulator's faults, by the fault of the live job; the victim is rank 2 in both."""
    from stallscope.events.names import Category
    from stallscope.synth import HostStall, MissingRank, Schedule, SharedDevice

    def stall(
        cause: str, ms: int, *, first: int = 20, every: int = 1, until: int | None = None
    ) -> list[Fault]:
        schedule = Schedule(first=first, every=every, until=until)
        return [HostStall(cause=cause, ranks=(2,), delay_ns=ms * 10**6, schedule=schedule)]

    return {
        "healthy": [],
        "disk": stall("block_io", 120, first=180, every=7),
        "cold": stall("host_compute", 150, first=0, until=7),
        "copy": stall("host_device_copy", 40),
        "sleep": stall("host_sleep", 290, every=14, first=10),
        "cpu-hog": stall("cpu_preemption", 30),
        "gpu-steal": [SharedDevice(ranks=(2,))],
        "input": stall("input_starvation", 150, every=10, first=10),
        "hang": [MissingRank(ranks=(2,), step=40, doing=Category.SLEEP)],
    }
