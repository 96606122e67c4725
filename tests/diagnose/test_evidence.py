"""The three answers: health needs evidence, and the gaps name the missing data."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.report import text
from stallscope.diagnose.report.evidence import SLOWNESS, Evidence, gaps
from stallscope.diagnose.report.verdict import as_json
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.trace import Coverage, Gap
from stallscope.synth import Capture, simulate
from stallscope.synth import Job as SimulatedJob

from .builders import MS, Call, Job, dp_trace, every, trace_of
from .reports import report_of

LIMITS = Thresholds()
COMPLETE = Evidence(n_ranks=8, n_rounds=120, n_whole_rounds=120, n_steps=40, step_ms=20.0, n_records=10_000)
GAP = Gap("the NCCL kernels carry no arguments", "Record again with PyTorch 2.2 or later.")


def reasons(**changes: object) -> list[str]:
    return [gap.reason for gap in gaps(replace(COMPLETE, **changes), LIMITS)]


def test_complete_data_have_no_gap():
    assert reasons() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_ranks": 1, "n_ranks_unseen": 7}, "7 of 8 ranks are not in this trace"),
        ({"n_whole_rounds": 60}, "60 of 120 rounds lack members: clocks may be misaligned"),
        ({"n_steps": 3}, "only 3 steps"),
        ({"n_steps": 0}, "no steps"),
        ({"n_clocks_apart": 1}, "the clocks of 1 node could not be aligned"),
        ({"clock_error_ms": 16.0}, "aligned only within 16.0 ms"),
        ({"n_lost_records": 5_000}, "5,000 records lost"),
        ({"hosts_run_ahead": True}, "the hosts run ahead of their GPUs"),
        (
            {"coverage": Coverage(omitted={"kernels without a stream": 2_000})},
            "2,000 kernels without a stream",
        ),
        ({"coverage": Coverage(gaps=(GAP,))}, GAP.reason),
    ],
)
def test_each_kind_of_missing_data_is_a_gap(changes, words):
    (reason,) = reasons(**changes)
    assert words in reason


def test_dumps_need_no_steps_and_name_their_blind_spot():
    dumps = Coverage(blind_spots=(SLOWNESS,))
    assert reasons(coverage=dumps, n_steps=None) == []
    assert reasons(coverage=dumps, n_steps=None, n_ranks=1, n_ranks_unseen=7) == ["7 of 8 ranks left no data"]


def test_a_few_lost_records_and_rounds_cut_off_at_the_ends_leave_a_job_healthy():
    assert reasons(n_lost_records=7, n_whole_rounds=118, coverage=Coverage(omitted={"odd rows": 9})) == []


def test_health_is_reported_with_its_evidence():
    report = report_of(dp_trace())
    assert report.answer == "healthy"
    words = text.report(report)
    assert (
        f"{report.examined['n_rounds']} of {report.examined['n_rounds']} rounds matched on all members"
        in words
    )
    assert "no records lost, no ranks unseen" in words


@pytest.mark.parametrize(("share", "is_printed"), [(0.3, True), (0.06, False), (None, False)])
def test_health_is_reported_with_the_change_that_may_not_show(share, is_printed):
    whole = report_of(dp_trace())
    limited = replace(whole, evidence=replace(whole.evidence, min_change_share=share))
    assert ("a change of the job's pace of less than 30% may not show" in text.report(limited)) == is_printed
    assert as_json(limited)["evidence"]["min_change_share"] == share


def test_an_inconclusive_answer_states_the_reason_and_the_action():
    report = report_of(replace(dp_trace(), coverage=Coverage(gaps=(GAP,))))
    assert (report.answer, report.healthy, report.verdicts) == ("inconclusive", False, [])
    words = text.report(report)
    assert f"Inconclusive: {GAP.reason}." in words
    assert GAP.action in words


def test_a_fault_in_incomplete_data_is_still_reported():
    report = report_of(replace(dp_trace(every(2, 7, 50 * MS)), coverage=Coverage(gaps=(GAP,))))
    assert (report.answer, report.verdicts[0].ranks) == ("found", [2])


def test_rounds_that_lack_members_are_counted():
    trace = dp_trace()
    rows = trace.collectives
    is_half = np.isin(rows["pid"], trace.processes["pid"][:2]) & (rows["seq"] % 2 == 0)
    report = report_of(replace(trace, collectives=rows[~is_half]))
    evidence = report.evidence
    assert evidence.n_rounds - evidence.n_whole_rounds == pytest.approx(evidence.n_rounds / 2, abs=1)
    assert report.answer == "inconclusive"


def test_the_exit_codes_of_the_answers_differ():
    codes = {report_of(dp_trace(n_steps=n)).answer.exit_code for n in (3, 40)}
    codes.add(report_of(dp_trace(every(2, 7, 50 * MS))).answer.exit_code)
    assert codes == {0, 20, 21}


def test_a_job_of_which_the_launcher_started_more_ranks_is_not_healthy():
    whole = dp_trace()
    processes = whole.processes.copy()
    processes["nranks"] = len(processes) + 4
    report = report_of(replace(whole, processes=processes))
    assert report.answer == "inconclusive"
    assert "4 of 8 ranks are not in this trace" in report.gaps[0].reason


def test_calls_that_do_not_repeat_are_not_healthy():
    """Each call of the job differs from all others: its steps are unknown."""
    waits = {i * (i + 1) // 2 for i in range(20)}  # further and further apart
    calls = tuple(
        Call((tuple(range(4)),), count=1000 + i, waits=i in waits, work_ns=2 * MS) for i in range(200)
    )
    report = report_of(trace_of(Job(calls, n_ranks=4, n_steps=1)))
    assert report.answer == "inconclusive"
    assert "do not repeat" in report.gaps[0].reason


@pytest.mark.parametrize(
    ("sync_every", "has_gpu_times", "is_healthy"),
    [(1, False, True), (2, False, True), (12, False, False), (12, True, True)],
)
def test_hosts_that_run_ahead_show_health_only_with_the_times_of_the_gpus(
    sync_every, has_gpu_times, is_healthy
):
    job = SimulatedJob(dp=4, steps=72, sync_every=sync_every)
    trace, _ = simulate(job, capture=Capture(has_gpu_times=has_gpu_times), has_twin=False)
    report = report_of(trace)
    assert not report.verdicts
    assert report.healthy == is_healthy
