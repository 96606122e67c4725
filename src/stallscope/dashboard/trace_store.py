"""A node trace in a temporary store, with the verdicts of `explain`, and the page's memory over it."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.dashboard.trace_rows import TENANT, batches, last_ns, verdict_batch
from stallscope.diagnose import Answer, Report
from stallscope.events.trace import Trace
from stallscope.page.memory import Job
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import HubStore

_APPEND_S = 60.0
_MEMORY_BYTES = 1_000_000_000


@dataclass
class TraceStore:
    """The store of one trace. load() replaces its rows' verdicts and adds the rows that are new."""

    store: HubStore
    folder: Path
    cluster: str
    report: Report | None = None
    end_ns: int = field(default_factory=time.time_ns)
    _loaded: set[str] = field(default_factory=set)

    def load(self, trace: Trace, report: Report) -> None:
        """Store the rows of a trace and the verdicts of its report."""
        for batch in batches(trace, self.cluster):
            if not batch.batch_id or batch.batch_id not in self._loaded:
                self.store.append(batch).result(_APPEND_S)
                self._loaded.add(batch.batch_id)
        self.end_ns = last_ns(trace)
        if verdicts := verdict_batch(report, self.cluster, last_ns=self.end_ns):
            self.store.append(verdicts).result(_APPEND_S)
        self.report = report

    def judged(self, job: Job) -> tuple[str, str]:
        """The state of a job without a verdict, and its reason: the answer of the report."""
        if self.report is None or self.report.answer is Answer.INCONCLUSIVE:
            gaps = self.report.gaps if self.report else ()
            return "unknown", "; ".join(gap.reason for gap in gaps) or "the data cannot decide"
        return "healthy", ""


@contextmanager
def opened(cluster: str) -> Iterator[TraceStore]:
    """An empty store in a temporary folder, which the end of the with block removes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stallscope-dashboard-")))
        store = stack.enter_context(closing(HubStore.open(folder, Limits.within(_MEMORY_BYTES))))
        yield TraceStore(store, folder, cluster)


Diagnosed = Callable[[Trace], Report]
"""The diagnosis with the thresholds and the price of the settings."""

__all__ = ["TENANT", "Diagnosed", "TraceStore", "opened"]
