"""The recordings: real jobs with one fault each. Nothing in the diagnosis may know them."""

import json
import os
from pathlib import Path

import pytest

from stallscope.importers import importer_for

from .reports import only, report_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("STALLSCOPE_DATA") or ROOT.parent / "shared") / "recordings"
TRUTHS = {path.parent.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*/truth.json"))}
WITHOUT_SYSTEM_CALLS = {"host_sleep": {"host_sleep", "blocked"}}
"""Older recordings do not distinguish a sleep from another blocking call."""

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def report(request, recordings):
    """The report on the given recording."""
    folder = recordings / request.param
    return report_of(importer_for(folder).read(folder))


def cases(wanted):
    """The recordings whose truth fulfils a condition, or a skip where there are none."""
    names = [name for name, truth in TRUTHS.items() if wanted(truth)]
    return pytest.mark.parametrize("report", names or [pytest.param("none")], indirect=True, ids=str)


def name_of(request):
    return request.node.callspec.params["report"]


@cases(lambda truth: True)
def test_exactly_the_culprits_are_named(report, request):
    named = {rank for verdict in report.verdicts for rank in verdict.ranks}
    assert named == set(TRUTHS[name_of(request)]["culprit_ranks"])


@cases(lambda truth: not truth["culprit_ranks"] and "kind" not in truth)
def test_healthy_jobs_are_healthy(report):
    assert report.healthy


@cases(lambda truth: truth.get("kind") == "imbalance")
def test_a_slow_stage_is_imbalance(report, request):
    verdict = only(report)
    assert (verdict.kind, verdict.ranks) == ("imbalance", [])
    assert verdict.evidence.slow_stage == TRUTHS[name_of(request)]["slow_stage"]


@cases(lambda truth: truth["culprit_ranks"])
def test_the_first_cause_is_the_injected_cause(report, request):
    cause = TRUTHS[name_of(request)]["cause"]
    assert report.verdicts[0].causes[0].cause.name in WITHOUT_SYSTEM_CALLS.get(cause, {cause})
    assert report.verdicts[0].causes[0].share >= 0.8


@cases(lambda truth: truth["culprit_ranks"])
def test_the_period_is_the_injected_period(report, request):
    assert report.verdicts[0].period_steps == TRUTHS[name_of(request)].get("period_steps")


@cases(lambda truth: truth["culprit_ranks"])
def test_the_others_are_its_victims(report, request):
    culprits = set(TRUTHS[name_of(request)]["culprit_ranks"])
    assert (
        set(report.verdicts[0].victims) == set(range(len(TRUTHS[name_of(request)]["rank_pids"]))) - culprits
    )


@cases(lambda truth: "delay_ms" in truth)
def test_the_delay_matches_the_injected_delay(report, request):
    assert report.verdicts[0].late_ms["median"] == pytest.approx(
        TRUTHS[name_of(request)]["delay_ms"], rel=0.1
    )


@cases(lambda truth: truth["cause"] == "gpu_shared")
def test_a_shared_gpu_is_a_device_verdict(report, request):
    assert report.verdicts[0].kind == "device"
    assert report.verdicts[0].ranks == TRUTHS[name_of(request)]["culprit_ranks"]


@cases(lambda truth: truth["scenario"] == "host_sleep_periodic")
def test_the_cost_of_a_periodic_sleep_is_the_wait_of_its_victims(report):
    """Four delays of 290 ms and three victims: these four steps last longer by that much for each victim."""
    verdict = only(report)
    assert verdict.cost.gpu_seconds == pytest.approx(4 * 0.2925 * 3, rel=0.02)
    assert verdict.n_incidents == 4
    assert verdict.causes[0].share > 0.95


@cases(lambda truth: truth["culprit_ranks"])
def test_the_delay_lies_in_the_time_of_the_recording(report, request, recordings):
    import pyarrow.parquet as pq

    truth = TRUTHS[name_of(request)]
    times = pq.read_table(recordings / name_of(request) / "events.parquet", columns=["ts_ns"])["ts_ns"]
    shift = truth["clock"]["realtime_ns"] - truth["clock"]["monotonic_ns"]
    first, last = times[0].as_py() + shift, times[-1].as_py() + shift
    for verdict in report.verdicts:
        assert first <= verdict.since_ns <= verdict.until_ns <= last
