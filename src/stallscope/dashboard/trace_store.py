"""A node trace in a temporary store, with the verdicts of `explain`, and the page's memory over it."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.dashboard.trace_jobs import report_batch
from stallscope.dashboard.trace_rows import TENANT, batches, last_ns
from stallscope.diagnose import Report, Verdict
from stallscope.events.trace import Trace
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
    is_live: bool = False
    end_ns: int = field(default_factory=time.time_ns)
    _latest: tuple[Trace, Report] | None = None
    _loaded: set[str] = field(default_factory=set)

    def load(self, trace: Trace, report: Report, *, is_live: bool) -> None:
        """Store the rows of a trace, its jobs, and the verdicts of its report. is_live: the trace grows."""
        for batch in batches(trace, self.cluster):
            if not batch.batch_id or batch.batch_id not in self._loaded:
                self.store.append(batch).result(_APPEND_S)
                self._loaded.add(batch.batch_id)
        self.end_ns = last_ns(trace)
        before, self._latest = self._latest, (trace, report)
        self._write_report(is_live=is_live, before=before[1].verdicts if before else ())

    def end(self) -> None:
        """Note that the trace has stopped growing."""
        if self.is_live:
            self._write_report(is_live=False)

    def _write_report(self, *, is_live: bool, before: Sequence[Verdict] = ()) -> None:
        assert self._latest is not None
        batch = report_batch(*self._latest, self.cluster, is_over=not is_live, before=before)
        self.store.append(batch).result(_APPEND_S)
        self.is_live = is_live


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
