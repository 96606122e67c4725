"""A simulated training job with known faults, as a trace: for tests, benchmarks and detection curves.

The simulator is independent of the diagnosis. docs/decisions/simulator.md describes its model and the fit of its
parameters.

simulated_job      the shape of a job and its durations
groups             the communicators of the ranks
simulated_program  a step as instructions
step_plan          the costs of one step, with scatter
schedule           the steps of a fault
fault_models       causes of host delays, and the right answer
slow               causes of slower work
hangs              faults after which a job never continues
hosts              host and device timelines
simulated_machine  advances all ranks through a step
simulated_clocks   node and GPU clocks
observed           the records of a capture
truth              the right answer and its cost
simulate           from a job and faults to a trace
fault_scenarios    a catalogue of shapes and faults
"""

from stallscope.synth.fault_models import HOST_CAUSES, Answer, Fault, HostStall
from stallscope.synth.hangs import CrossedOrder, MismatchedCall, MissingRank
from stallscope.synth.observed import Capture
from stallscope.synth.schedule import Schedule
from stallscope.synth.simulate import batches, simulate
from stallscope.synth.simulated_clocks import ClockSpread
from stallscope.synth.simulated_job import Job, Timing
from stallscope.synth.simulated_program import Phase
from stallscope.synth.slow import MovingImbalance, SharedDevice, SlowDevice, SlowLaunches
from stallscope.synth.truth import Truth

__all__ = [
    "HOST_CAUSES",
    "Answer",
    "Capture",
    "ClockSpread",
    "CrossedOrder",
    "Fault",
    "HostStall",
    "Job",
    "MismatchedCall",
    "MissingRank",
    "MovingImbalance",
    "Phase",
    "Schedule",
    "SharedDevice",
    "SlowDevice",
    "SlowLaunches",
    "Timing",
    "Truth",
    "batches",
    "simulate",
]
