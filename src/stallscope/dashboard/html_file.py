"""The report on a trace as one HTML file: verdict, evidence, heat map and one round."""

from contextlib import closing
from pathlib import Path
from urllib.parse import urlencode

from stallscope.dashboard.trace_store import TENANT, opened
from stallscope.diagnose import Report
from stallscope.errors import NotFound, writing
from stallscope.events.trace import Trace
from stallscope.page.job_cells import JobMemory
from stallscope.page.job_list import Jobs
from stallscope.page.snapshot import SnapshotView, snapshot
from stallscope.store import file_modes

_S_NS = 10**9
_COLUMNS = 600
_FEWEST_COLUMNS = 120
"""A window of fewer seconds has finer columns than seconds."""

_FILE_MODE = 0o644


def write_html(path: Path, trace: Trace, report: Report, *, name: str) -> int:
    """Write the file. Returns its size in bytes. Raises NotFound for a trace without a job, StorageFailed."""
    with opened(name) as trace_store:
        trace_store.load(trace, report, is_live=False)
        with closing(JobMemory(trace_store.store, since_ns=0)) as memory:
            memory.wait_until_current()
            jobs = Jobs(trace_store.store, memory, now_ns=lambda: trace_store.end_ns, is_whole_trace=True)
            rows = jobs.rows(TENANT)
            if not rows:
                raise NotFound(
                    "the trace contains no process to show; run explain without --html to print the report"
                )
            html = snapshot(jobs, TENANT, _view(trace_store.end_ns, rows[0]))
    with writing(path, "choose another path with --html"):
        file_modes.replace(path, html.encode(), _FILE_MODE)
    return len(html)


def _view(end_ns: int, row: dict[str, object]) -> SnapshotView:
    """The last ten minutes of the most urgent job."""
    to_ns = (end_ns // _S_NS + 1) * _S_NS
    key, first_ms = str(row["job"]), row["first_ms"]
    begin_ns = first_ms * 10**6 // _S_NS * _S_NS if isinstance(first_ms, int) else 0
    from_ns = max(to_ns - _COLUMNS * _S_NS, min(begin_ns, to_ns - _S_NS))
    return SnapshotView(
        query=urlencode({"job": key}),
        job=key,
        from_ns=from_ns,
        to_ns=to_ns,
        n=max(_FEWEST_COLUMNS, (to_ns - from_ns) // _S_NS),
    )
