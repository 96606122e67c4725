"""Verdicts as data and in words."""

import json
from dataclasses import replace

import jsonschema
import pytest

from stallscope.diagnose import evidence_fields
from stallscope.diagnose.evidence_fields import CauseEvidence, VerdictEvidence, without_old_names
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict, VerdictCost, as_json, wall_text
from stallscope.events.names import Category
from stallscope.events.trace import Clock

from .builders import EPOCH_NS, MS, START_NS, dp_trace, every
from .reports import SCHEMA, only, report_of

TRACE = dp_trace(every(2, 7, 50 * MS, category=Category.IO))


def test_since_is_when_the_first_delay_began():
    """The clock reading ties 0 on the monotonic clock to EPOCH_NS; the job begins START_NS after it."""
    verdict = only(report_of(TRACE))
    step_ns, min_ns = 3 * (2 * MS + 10_000) + 110_000, 3 * (2 * MS + 10_000)
    begin = verdict.since_ns - EPOCH_NS - START_NS
    assert 5 * min_ns <= begin <= 6 * step_ns
    # The last of the five delays is in step 33.
    assert verdict.until_ns - verdict.since_ns >= (33 - 5 - 1) * min_ns + 5 * 50 * MS
    data = as_json(report_of(TRACE))["verdicts"][0]
    assert data["since"].startswith("2023-11-14T22:13:30.")
    assert data["since"] < data["until"]


def test_without_a_clock_reading_the_wall_times_are_null():
    data = as_json(report_of(replace(TRACE, clocks=())))["verdicts"][0]
    assert (data["since"], data["until"]) == (None, None)


def test_the_nearest_clock_reading_counts():
    late = Clock(0, START_NS + 200 * MS, EPOCH_NS + START_NS + 200 * MS + 7_000 * MS)
    early = Clock(0, START_NS, EPOCH_NS + START_NS)
    verdict = only(report_of(replace(TRACE, clocks=(early, late))))
    # From the first delay at 30 ms to the last near 400 ms: the wall clock was put forward by 7 s in between.
    assert verdict.until_ns - verdict.since_ns > 7_000 * MS


@pytest.mark.parametrize(
    ("wall_ns", "wanted"),
    [
        (None, None),
        (0, "1970-01-01T00:00:00.000Z"),
        (1_795_815_136_223_999_999, "2026-11-27T21:32:16.223Z"),
        (1_700_000_000_001_000_000, "2023-11-14T22:13:20.001Z"),
    ],
)
def test_wall_times_are_utc_with_milliseconds(wall_ns, wanted):
    assert wall_text(wall_ns) == wanted


def test_every_wall_time_keeps_its_milliseconds():
    for ms in range(0, 1000):
        assert wall_text(1_795_815_136_000_000_000 + ms * MS).endswith(f"16.{ms:03d}Z")


def test_a_verdict_has_the_late_rounds():
    verdict = only(report_of(TRACE))
    assert verdict.first_round in range(5 * 3, 6 * 3)
    assert verdict.last_round in range(33 * 3, 34 * 3)
    assert verdict.comm_hash == f"{int(TRACE.collectives['comm_hash'][0]):016x}"
    assert verdict.n_late_rounds == 15
    assert verdict.n_rounds == 120


def test_the_examined_data_is_counted():
    examined = report_of(replace(TRACE, lost={"arrival": 3, "call": 4})).examined
    assert examined["n_ranks"] == 4
    assert examined["n_communicators"] == examined["n_nodes"] == 1
    assert examined["n_rounds"] == 120
    assert examined["n_lost_records"] == 7
    ts_ns = TRACE.collectives["ts_ns"]
    assert examined["seconds"] == pytest.approx((ts_ns.max() - ts_ns.min()) / 1e9, abs=1e-3)


def test_lost_records_and_late_attach_lower_the_confidence():
    sure = only(report_of(TRACE)).confidence
    assert only(report_of(replace(TRACE, lost={"arrival": 3}))).confidence < sure
    rows = TRACE.collectives.copy()
    rows["flags"] |= 8
    assert only(report_of(replace(TRACE, collectives=rows))).confidence < sure


def test_recurrence_raises_the_confidence():
    few = only(report_of(dp_trace(every(2, 12, 50 * MS, until=40), n_ranks=8)))
    many = only(report_of(dp_trace(every(2, 3, 50 * MS, until=40), n_ranks=8)))
    assert few.confidence < many.confidence <= 0.99


def test_the_text_report_has_the_main_facts_of_a_verdict():
    words = text.report(report_of(replace(TRACE, lost={"arrival": 3}), usd_per_gpu_hour=2.0))
    lines = words.splitlines()
    assert lines[0] == "Events: made by hand."
    assert "3 records lost" in lines[1]
    assert (
        "Rank 2 (host host-a, pid 1002) slows down the job: 50.0 ms late every 7 steps, waiting for disk or file I/O."
        in words
    )
    rows = [line[2:12].strip() for line in lines[lines.index("") + 2 :]]
    names = [name for name in rows if name]
    assert names == ["since", "cause", "victims", "cost", "confidence", "severity", "action"]
    for part in ("100 % disk or file I/O", "ranks 0, 1, 3 waited", "USD", "GPU hours a day"):
        assert part in words


def test_a_cost_without_a_price_is_in_gpu_seconds():
    verdict = only(report_of(TRACE))
    words = text.report(report_of(TRACE))
    assert f"{verdict.cost.gpu_seconds:.1f} GPU seconds" in words
    assert "USD" not in words


def test_the_rate_is_the_cost_over_the_examined_time():
    cost = VerdictCost.of(18.0, None, is_lower_bound=False, observed_ns=12e9)
    assert cost.gpu_hours_per_day == pytest.approx(18 / 12 * 24)


def test_many_ranks_are_cut_short():
    gone = Verdict(kind="hang", summary="", ranks=list(range(40)), evidence=VerdictEvidence(waited_s=12.0))
    summary = text.summary(replace(gone, first_round=3, comm_hash="00" * 8))
    assert "and 28 more" in summary
    assert len(summary) < 200


def test_a_whole_node_is_one_verdict():
    delays = [*every(4, 5, 50 * MS), *every(5, 5, 50 * MS)]
    node = (0, 0, 1, 1, 2, 2, 3, 3)
    report = report_of(dp_trace(delays, n_ranks=8, node=node, offset_ns=(0,) * 4))
    verdict = only(report)
    assert (verdict.ranks, verdict.nodes) == ([4, 5], ["host-c"])
    assert verdict.evidence.is_whole_node is True
    assert "Node host-c (ranks 4, 5)" in verdict.summary
    assert verdict.victims == [0, 1, 2, 3, 6, 7]


def test_every_kind_of_verdict_is_printed_and_matches_the_schema():
    for kind in SCHEMA["$defs"]["verdict"]["properties"]["kind"]["enum"]:
        verdict = Verdict(
            kind=kind,
            summary="x",
            ranks=[1] if kind not in ("imbalance", "change", "link", "inconclusive") else [],
            late_ms={"median": 2500.0, "max": 3000.0},
            cost=VerdictCost(1.5, 0.2, 3.0, True),
            abstained_because="two ranks are late as often" if kind == "inconclusive" else None,
            evidence=VerdictEvidence(
                n_late_steps=3,
                n_steps=9,
                waited_s=11.0,
                suspects=[2, 3],
                times_as_long=4.0,
                step_ms_before=100.0,
                step_ms_after=130.0,
                from_step=40,
                grew_ms={"io": 30.0},
            ),
        )
        report = Report("x", report_of(TRACE).examined, [replace(verdict, summary=text.summary(verdict))])
        jsonschema.validate(json.loads(json.dumps(as_json(report))), SCHEMA)
        assert text.summary(verdict) in text.report(report)


def test_the_schema_rejects_unknown_and_missing_fields():
    data = as_json(report_of(TRACE))
    for broken in (
        data | {"more": 1},
        data | {"verdicts": [data["verdicts"][0] | {"kind": "slow"}]},
        {name: value for name, value in data.items() if name != "healthy"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, SCHEMA)


def test_two_causes_of_equal_share_are_both_reported():
    disk = every(2, 14, 50 * MS, category=Category.IO)
    locks = every(2, 14, 50 * MS, first=12, category=Category.LOCK)
    both = only(report_of(dp_trace([*disk, *locks])))
    first, second = both.causes
    assert both.summary.endswith(f", {first.state} and {second.state}.")
    assert {cause.cause.name for cause in both.causes} == {"block_io", "lock_contention"}
    assert both.advice == [*first.cause.advice(first.evidence), *second.cause.advice(second.evidence)]


def test_renamed_facts_have_both_names_in_json_and_one_name_for_a_reader():
    cause = CauseEvidence(typical_mhz=1980, clock_mhz=1200)
    facts = {
        "evidence": {"doing": [{"stands": "waits", "standstill_state": "waits"}]},
        "causes": [evidence_fields.as_json(cause)],
    }
    assert evidence_fields.as_json(cause) == {"typical_mhz": 1980, "usual_mhz": 1980, "clock_mhz": 1200}
    assert without_old_names(facts) == {
        "evidence": {"doing": [{"standstill_state": "waits"}]},
        "causes": [{"typical_mhz": 1980, "clock_mhz": 1200}],
    }
    assert without_old_names({"said": "stored by the previous release"}) == {
        "said": "stored by the previous release"
    }
