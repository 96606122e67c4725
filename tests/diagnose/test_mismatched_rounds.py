"""Mismatches: ranks that enter one round with different calls."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.events.names import CollectiveFlag, Op

from .builders import dp_trace
from .reports import only, report_of


def changed(column, value, *, ranks=(2,), seq=50):
    trace = dp_trace()
    rows = trace.collectives
    rows[column][np.isin(rows["pid"] - 1000, ranks) & (rows["seq"] == seq)] = value
    return trace


@pytest.mark.parametrize(("column", "value"), [("op", Op.ALL_GATHER), ("count", 17), ("datatype", 3)])
def test_the_odd_rank_is_named(column, value):
    verdict = only(report_of(changed(column, value)))
    assert (verdict.kind, verdict.ranks, verdict.victims) == ("mismatch", [2], [0, 1, 3])
    assert (verdict.first_round, verdict.last_round) == (50, 50)
    output = {call.rank: call for call in verdict.evidence.calls}
    lower = value.name.lower() if column == "op" else value
    assert getattr(output[2], column) == lower != getattr(output[0], column)


def test_a_lasting_mismatch_is_one_verdict_with_the_cost_of_the_standstill():
    trace = changed("count", 17, seq=50)
    rows = trace.collectives
    rows["op"][(rows["pid"] == 1002) & (rows["seq"] == 51)] = Op.BROADCAST
    last_ns = int(rows["ts_ns"][rows["seq"] <= 51].max())
    stands = replace(trace, collectives=rows[rows["seq"] <= 51], ends_ns=(last_ns + 20 * 10**9,))
    verdict = only(report_of(stands))
    assert (verdict.ranks, verdict.first_round, verdict.last_round) == ([2], 50, 51)
    assert verdict.cost.gpu_seconds == pytest.approx(3 * 20)
    assert "no progress for 20.0 s" in verdict.summary
    assert only(report_of(trace)).cost is None  # it went on


def test_without_a_majority_all_are_named():
    assert only(report_of(changed("count", 17, ranks=(1, 2)))).ranks == [0, 1, 2, 3]


def test_a_rank_attached_late_is_not_accused():
    trace = changed("count", 17)
    own_rows = trace.collectives["pid"] == 1002
    trace.collectives["flags"][own_rows] |= np.uint32(CollectiveFlag.LATE_ATTACH)
    assert report_of(trace).healthy


def test_numbers_that_are_off_throughout_are_not_the_program():
    trace = dp_trace()
    own_rows = trace.collectives["pid"] == 1002
    trace.collectives["seq"][own_rows] += 1
    assert not [v for v in report_of(trace).verdicts if v.kind == "mismatch"]


@pytest.mark.parametrize("seq", [0, -1])
def test_unnumbered_rounds_are_not_a_mismatch(seq):
    trace = dp_trace()
    trace.collectives["seq"] = seq
    assert not [v for v in report_of(trace).verdicts if v.kind == "mismatch"]
