"""A simulated training job with known faults, as a trace: for tests, benchmarks and detection curves.

Written apart from the diagnosis, of which it knows nothing. What it models and how its parameters were fitted
stands in docs/decisions/simulator.md.

job        the shape of a job and its durations      groups    who talks to whom
program    a step as instructions                    plan      the costs of one step, with scatter
schedule   when a fault strikes                      faults    what holds a host up, and the right answer
slow       what makes the work itself slower         hangs     after what a job never goes on
hosts      host and device timelines                 machine   advances all ranks through a step
clocks     node and GPU clocks                       observed  what a capture would have written
truth      the right answer and its cost             simulate  from a job and faults to a trace
scenarios  a catalogue of shapes and faults
"""

from stallscope.synth.clocks import ClockSpread
from stallscope.synth.faults import HOST_CAUSES, Answer, Fault, HostStall
from stallscope.synth.hangs import CrossedOrder, MismatchedCall, MissingRank
from stallscope.synth.job import Job, Timing
from stallscope.synth.observed import Capture
from stallscope.synth.program import Phase
from stallscope.synth.schedule import Schedule
from stallscope.synth.simulate import batches, simulate
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
