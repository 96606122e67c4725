"""A job whose delay may be hidden: its cost is known as a range only."""

from stallscope.events.trace import Trace
from stallscope.synth import HostStall, Job, Schedule, Timing, simulate

MS = 1_000_000
VICTIM = 5


def slack_trace(*, ranks_per_node: int = 8) -> Trace:
    """8 ranks in a pipeline of four stages; one sleeps every third step, and slack hides most of the delay."""
    schedule = Schedule(first=8, every=3)
    fault = HostStall(cause="host_sleep", ranks=(VICTIM,), delay_ns=20 * MS, schedule=schedule)
    job = Job(dp=2, pp=4, steps=40, layers=2, buckets=1, microbatches=2, ranks_per_node=ranks_per_node)
    kernels = Timing(forward_ns=1_500_000, backward_ns=3_000_000)
    return simulate(job, [fault], seed=1, timing=kernels, has_twin=False)[0]
