"""The rows of `jobs`: a row is written when its answer or members change, when the job ends, and every some seconds."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stallscope.continuous.verdict_rows import job_row
from stallscope.diagnose import JobState
from stallscope.events.owner import GROUP_LABELS, column

EVERY_S = 10.0
_OF_STATE = ("answer", "reasons", "n_ranks", "ended_ns", *map(column, GROUP_LABELS))


@dataclass
class JobRows:
    """known: the last row of each running job, and when it was written (monotonic), by tenant, cluster and id."""

    known: dict[tuple[str, str, str], tuple[dict[str, Any], float]] = field(default_factory=dict)

    def changed(
        self, tenant: str, cluster: str, jobs: Iterable[JobState], now_s: float
    ) -> list[dict[str, Any]]:
        """The rows of a cluster to write now."""
        out = []
        for job in jobs:
            key, row = (tenant, cluster, job.id), job_row(job, cluster)
            before, at_s = self.known.get(key, ({}, -EVERY_S))
            is_new = any(before.get(name) != row[name] for name in _OF_STATE)
            if is_new or (now_s - at_s >= EVERY_S and before != row):
                out.append(row)
                self.known[key] = row, now_s
            if job.ended_ns is not None:
                self.known.pop(key, None)
        return out
