"""A simulated training job with known faults, as a trace: for tests, benchmarks and detection curves.

Written apart from the diagnosis, of which it knows nothing. What it models and how its parameters were fitted
stands in docs/decisions/simulator.md.

job        the shape of a job and its durations      groups    who talks to whom
program    a step as instructions                    plan      the costs of one step, with scatter
schedule   when a fault strikes                      faults    what can go wrong, and the right answer
hosts      host and device timelines                 machine   advances all ranks through a step
clocks     node and GPU clocks                       observed  what a capture would have written
truth      the right answer and its cost             simulate  from a job and faults to a trace
scenarios  a catalogue of shapes and faults
"""

from stallscope.synth.clocks import ClockSpread
from stallscope.synth.faults import Fault, HostStall
from stallscope.synth.job import Job, Timing
from stallscope.synth.observed import Capture
from stallscope.synth.schedule import Schedule
from stallscope.synth.simulate import batches, simulate
from stallscope.synth.truth import Truth

__all__ = [
    "Capture",
    "ClockSpread",
    "Fault",
    "HostStall",
    "Job",
    "Schedule",
    "Timing",
    "Truth",
    "batches",
    "simulate",
]
