"""The diagnosis of events that keep arriving: verdicts open, are updated, and close.

stream     the whole: batches go in, changes come out
nodes      the nodes of a stream: numbers, clocks, how far each was heard
members    which processes belong to one job
rows       the latest rows of a job, and which of them are complete
numbering  rounds of ranks that were captured late
watch      a cheap look at each arriving row: is it worth a diagnosis now?
job        one job: when to look, and what is kept
look       one diagnosis of a job's rows, together with what is kept of the past
sightings  what a look shows, verdict by verdict
history    late steps whose rows are gone
failing    CUDA calls that failed, judged when their process is known to end
standing   hangs, told by time going by
incidents  verdicts over time
"""

from stallscope.diagnose.stream.incidents import Change
from stallscope.diagnose.stream.stream import Stream
from stallscope.diagnose.stream.window import Retention

__all__ = ["Change", "Retention", "Stream"]
