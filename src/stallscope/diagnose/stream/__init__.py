"""The diagnosis of arriving events: incidents open, are updated, and close.

stream            the entry point: batches go in, changes come out
node_clocks       the nodes of a stream: numbers, clocks, time of the latest event
job_members       the processes of each job
window            the latest rows of a job, and which of them are complete
round_numbers     round numbers of ranks that were attached late
trigger           a cheap check of each arriving row: does the job need an evaluation now?
stream_job        one job: its rows, its history, and the schedule of its evaluations
job_state         a job's identity, members, times and answer
evaluation        one diagnosis of a job's rows together with its history
candidates        candidate verdicts of an evaluation
on_gpus           candidate verdicts from the rounds on the GPUs
history           late steps whose rows have been dropped
call_errors       failed CUDA calls, judged when their process has ended
engine_incidents  incidents of inference engines
idle_incidents    incidents of idle GPUs
gpu_drivers       GPU states that the drivers reported
open_hangs        hangs, detected by the time without calls
incidents         verdicts over time
"""

from stallscope.diagnose.stream.incidents import NO_MORE_EVENTS, TRACE_ENDED, Change
from stallscope.diagnose.stream.job_state import JobState, Member
from stallscope.diagnose.stream.round_numbers import Numbering
from stallscope.diagnose.stream.stream import Stream
from stallscope.diagnose.stream.stream_job import SKIPPED
from stallscope.diagnose.stream.window import Retention

__all__ = [
    "NO_MORE_EVENTS",
    "SKIPPED",
    "TRACE_ENDED",
    "Change",
    "JobState",
    "Member",
    "Numbering",
    "Retention",
    "Stream",
]
