"""A job that stood still before the trace began, as an incident."""

import queue
from contextlib import closing

from tests.diagnose.test_earlier_hang import SLEEPS, WAITS, trace

from stallscope.diagnose.thresholds import Thresholds
from stallscope.exporters.incident_finder import incident_finder
from stallscope.exporters.verdict_journal import VerdictJournal
from stallscope.live.stall_verdict import Standstill
from stallscope.live.tail import TraceTail
from stallscope.live.trace_records import verdict_record
from stallscope.store import node


def test_a_standstill_is_not_reported_before_the_hang_limit(tmp_path):
    db = tmp_path / "trace.db"
    node.write(db, trace(WAITS, SLEEPS, WAITS, looks_s=(3, 8)))
    assert Standstill(db, Thresholds()).changes(has_rounds=False) == []


def test_a_standstill_incident_closes_when_the_job_continues(tmp_path):
    db = tmp_path / "trace.db"
    node.write(db, trace(WAITS, SLEEPS, WAITS))
    standstill = Standstill(db, Thresholds())
    (opened,) = standstill.changes(has_rounds=False)
    assert (opened.kind, opened.verdict.ranks) == ("opened", [1])
    assert "likely wait for rank 1" in opened.verdict.summary
    assert standstill.changes(has_rounds=False) == []
    (closed,) = standstill.changes(has_rounds=True)
    assert (closed.state, closed.incident_id) == ("closed", opened.incident_id)
    assert standstill.changes(has_rounds=True) == []


def test_the_continuous_diagnosis_opens_an_incident_for_a_standstill(tmp_path):
    """From the process that runs next to an agent, through the trace, to the records of `trace --json`."""
    db = tmp_path / "trace.db"
    node.write(db, trace(WAITS, SLEEPS, WAITS))
    lines: queue.SimpleQueue[dict] = queue.SimpleQueue()
    with incident_finder(db, lines.put, {}):
        opened = lines.get(timeout=30)
    assert opened["verdict"]["evidence"]["captured_late"]
    assert lines.get(timeout=30)["reason"] == "the trace has ended"
    printed: list[str] = []
    journal = VerdictJournal(printed.append)
    journal.take(opened)
    with closing(node.NodeTrace(db)) as store, node.reading(db) as connection:
        following = TraceTail(connection)
        journal.write(store.insert)
        store.commit()
        ((at_ns, stored),) = following.verdicts()
        assert following.verdicts() == []
    record = verdict_record(at_ns, stored)
    assert (record["incident"], record["state"]) == (opened["incident"], "open")
    assert record["verdict"] == opened["verdict"]
    assert printed == [f"verdict opened: {opened['summary']}"]
