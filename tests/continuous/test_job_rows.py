"""The rows of `jobs`: processes that become one job, and jobs that end."""

import json
from dataclasses import replace

from stallscope.continuous.job_rows import EVERY_S, FIRST_S, JobRows, as_examined
from stallscope.diagnose import Answer, JobState, Member
from stallscope.diagnose.report.evidence import Evidence
from stallscope.events.trace import Gap

WAITING = Gap("too few rows", "wait")


def job(name: str, *pids: int, last_ns: int = 5, ended_ns: int | None = None) -> JobState:
    """A job that has not been evaluated."""
    return JobState(
        id=name,
        members=tuple(Member("n0", pid, pid) for pid in pids),
        begin_ns=1,
        last_ns=last_ns,
        ended_ns=ended_ns,
        answer=Answer.INCONCLUSIVE,
        evidence=None,
        reasons=(WAITING,),
    )


def written(rows: JobRows, now_s: float, *jobs: JobState) -> list[tuple[str, int]]:
    return [(row["job"], row["n_ranks"]) for row in rows.changed("t", "c", jobs, now_s)]


def test_a_process_that_was_not_evaluated_gets_a_row_only_after_some_seconds():
    rows = JobRows()
    assert written(rows, 0.0, job("n0/1", 1)) == []
    assert written(rows, FIRST_S - 1, job("n0/1", 1)) == []
    assert written(rows, FIRST_S, job("n0/1", 1)) == [("n0/1", 1)]


def test_processes_that_create_a_communicator_soon_are_one_row_only():
    rows = JobRows()
    assert written(rows, 0.0, job("n0/1", 1), job("n0/2", 2)) == []
    assert written(rows, 1.0, job("aa", 1, 2)) == [("aa", 2)]
    assert written(rows, FIRST_S + 1, job("aa", 1, 2)) == []


def test_the_row_of_a_job_whose_processes_joined_another_ends_without_members():
    rows = JobRows()
    written(rows, 0.0, job("aa", 1, 2))
    (ended, whole) = rows.changed("t", "c", [job("bb", 1, 2, 3, 4)], 1.0)
    assert (ended["job"], ended["n_ranks"], ended["members"], ended["ended_ns"]) == ("aa", 0, "[]", 5)
    assert "job bb" in json.loads(ended["reasons"])[0]["reason"] and whole["n_ranks"] == 4
    assert rows.changed("t", "c", [job("bb", 1, 2, 3, 4)], 2.0) == []


def test_a_job_that_the_diagnosis_does_not_know_after_its_restart_keeps_its_row():
    rows = JobRows()
    written(rows, 0.0, job("aa", 1, 2))
    assert written(rows, 1.0, job("cc", 7, 8)) == [("cc", 2)]


def test_a_running_job_is_written_every_some_seconds_and_at_its_end():
    rows = JobRows()
    assert written(rows, 0.0, job("aa", 1, 2)) == [("aa", 2)]
    assert written(rows, 1.0, job("aa", 1, 2, last_ns=6)) == []
    assert written(rows, EVERY_S, job("aa", 1, 2, last_ns=7)) == [("aa", 2)]
    assert written(rows, EVERY_S + 1, job("aa", 1, 2, last_ns=7, ended_ns=7)) == [("aa", 2)]


def test_no_job_is_healthy_while_rows_of_its_cluster_are_not_examined():
    healthy = replace(job("aa", 1, 2), answer=Answer.HEALTHY, reasons=())
    slow = replace(healthy, answer=Answer.FOUND)
    assert as_examined([healthy, slow], is_complete=True) == [healthy, slow]
    examined, found = as_examined([healthy, slow], is_complete=False)
    assert examined.answer is Answer.INCONCLUSIVE
    assert "not examined" in examined.reasons[0].reason
    assert found == slow


def test_the_row_of_a_job_has_its_typical_step():
    evaluated = replace(job("aa", 1, 2), evidence=Evidence(n_ranks=2, n_steps=40, step_ms=200.0))
    (row,) = JobRows().changed("t", "c", [evaluated], 0.0)
    evidence = json.loads(row["evidence"])
    assert (evidence["step_ms"], evidence["n_steps"]) == (200.0, 40)
