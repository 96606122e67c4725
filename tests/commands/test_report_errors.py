"""Error messages of `explain` for traces without anything to explain."""

import pytest

from stallscope.commands.report import print_reports
from stallscope.errors import NotFound
from stallscope.events import layout
from stallscope.events.trace import Trace
from stallscope.settings import Settings


def test_processes_without_calls_are_named():
    processes = layout.empty(layout.PROCESSES, 2)
    processes["pid"], processes["rank"] = (41, 42), (0, layout.UNKNOWN)
    with pytest.raises(NotFound, match=r"2 processes with a GPU library: 41 \(rank 0\), 42; .*gloo"):
        print_reports([Trace(processes=processes)], as_json=False, settings=Settings())
