"""The jobs of the proof, the most important first. The right answer of each job follows from its faults."""

from typing import NamedTuple


class Scenario(NamedTuple):
    """One job and how it is traced.

    words: of job.py. seconds: from warm to the end. attaches: the agent comes when the job is running already.
    """

    name: str
    words: tuple[str, ...]
    seconds: float = 9.0
    attaches: bool = False

    @property
    def hangs(self) -> bool:
        """It never ends by itself."""
        return any(word.startswith("hang") for word in self.words)


def _faults(*texts: str) -> tuple[str, ...]:
    return tuple(word for text in texts for word in ("--fault", text))


NO_SYNC = ("--no-sync",)
FIRST = (
    Scenario("sync sleep", _faults("sleep:2:14:290"), 12),
    Scenario("no-sync sleep", (*NO_SYNC, *_faults("sleep:2:14:290")), 14),
    Scenario("sync healthy", ()),
    Scenario("no-sync healthy", NO_SYNC),
)
"""The scenarios that must always run."""

MORE = (
    Scenario("alloc", _faults("alloc:3:5:290")),
    Scenario("lock", _faults("lock:1:8:150")),
    Scenario("disk", _faults("disk:0:7:120")),
    Scenario("stop", _faults("stop:0::300")),
    Scenario("compute", _faults("compute:2:10:120")),
    Scenario("copy", _faults("copy:1:1:40"), 7),
    Scenario("sync storm", _faults("sync:3:1:10"), 7),
    Scenario("late attach sleep", _faults("sleep:2:14:290"), 12, attaches=True),
    Scenario("hang", _faults("hang:3"), 16),
    Scenario("fsdp sleep", ("--kind", "fsdp", *_faults("sleep:2:14:290"))),
    Scenario("two culprits", _faults("sleep:2:14:290", "lock:1:9:150"), 12),
    Scenario("moving", _faults("sleep:*:6:80")),
    Scenario("gil", _faults("gil:1")),
    Scenario("input", _faults("input:2:10:200")),
    Scenario("no-sync lock", (*NO_SYNC, *_faults("lock:1:8:290")), 12),
    Scenario("fsdp healthy", ("--kind", "fsdp"), 7),
    Scenario("launch healthy", ("--kind", "launch"), 7),
    Scenario("launch sleep", ("--kind", "launch", *_faults("sleep:1:25:60")), 7),
    Scenario("graph healthy", ("--kind", "graph"), 7),
    Scenario("graph sleep", ("--kind", "graph", *_faults("sleep:1:25:60")), 7),
)
ONE_GPU_S, SHORT_ONE_GPU_S = 6.5, 5.0
"""For scenarios that are attached late or whose steps are long, and for the others."""
HANG_S = 16.0
"""A hang is reported after 10 s."""


def one_gpu_s(scenario: Scenario) -> float:
    """The length of a scenario on one GPU."""
    if scenario.hangs:
        return HANG_S
    return ONE_GPU_S if scenario.attaches or "gil" in scenario.name else SHORT_ONE_GPU_S


ONE_GPU = tuple(
    scenario._replace(words=("--kind", "small", *scenario.words), seconds=one_gpu_s(scenario))
    for scenario in (
        Scenario("stop", _faults("stop:0::300")),
        Scenario("compute", _faults("compute:2:10:120")),
        Scenario("late attach no-sync sleep", (*NO_SYNC, *_faults("sleep:2:14:290")), attaches=True),
        Scenario("late attach sleep", _faults("sleep:2:14:290"), attaches=True),
        Scenario("gil", _faults("gil:2")),
        Scenario("late attach gil", _faults("gil:2"), attaches=True),
        *FIRST[2:],
        *FIRST[:2],
        Scenario("lock", _faults("lock:1:8:150")),
        Scenario("disk", _faults("disk:0:7:120")),
        Scenario("alloc", _faults("alloc:3:5:290")),
        Scenario("hang", _faults("hang:3")),
    )
)
"""Four ranks on a single GPU, by CUDA's Multi-Process Service; NCCL connects them by sockets.

The hang is the last: its ranks are killed while their kernels run, and the service then refuses new processes for a
while (cudaErrorDevicesUnavailable).
"""

EMULATED = {
    *("slowdown sync", "slowdown no-sync", "sync sleep", "no-sync sleep", "sync healthy", "no-sync healthy"),
    *("alloc", "lock", "disk", "stop", "compute", "copy", "sync storm", "hang", "input", "late attach sleep"),
    *("gil", "late attach gil", "late attach no-sync sleep", "lock", "disk", "stop"),
}
"""Those that the demo's emulated job can run, with its own numbers."""
