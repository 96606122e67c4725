"""The continuous diagnosis: rows that arrive at the hub are diagnosed at once, and the verdicts are stored as rows.

diagnosis          the diagnosis of a hub: its clusters, divided into shards
shard              the thread that feeds the streams of a share of the clusters and writes verdicts
streams            the streams of one process
stream_process     the same streams in a separate process
stream_pool        processes of streams for the diagnoses of a hub's slots
backlog            the rows to examine: a turn for each cluster, a sample of rounds under overload, a limit
continued          incidents that keep their id over restarts and gaps
job_rows           the jobs of a cluster as rows of the hub
machine_incidents  incidents that machines have judged themselves, as rows of the hub
verdict_rows       the change of an incident as rows of the hub
"""

from stallscope.continuous.backlog import BacklogLimits
from stallscope.continuous.diagnosis import ContinuousDiagnosis

__all__ = ["BacklogLimits", "ContinuousDiagnosis"]
