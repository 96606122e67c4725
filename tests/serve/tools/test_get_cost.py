"""The cost of delays with ranges: sums have two bounds, or state that a bound is missing."""

from typing import Any

import pytest
from tests.serve.tools import cluster

from stallscope.serve.tools.answer_summary import SummaryParams, summary
from stallscope.serve.tools.get_cost import Cost, CostParams, get_cost
from stallscope.serve.tools.run_analysis import AnalysisParams, run_analysis
from stallscope.serve.tools.tenant_context import TenantContext
from stallscope.serve.tools.verdicts import VerdictsParams, verdicts
from stallscope.store.hub.store import Batch

NUMBER = {"verdict_id": "number", "rank": 1, "gpu_seconds": 100.0, "is_lower_bound": False}
RANGE = {
    "verdict_id": "range",
    "rank": 2,
    "gpu_seconds": 36.0,
    "is_lower_bound": True,
    "at_most_gpu_seconds": 360.0,
}
MAYBE = RANGE | {"verdict_id": "maybe", "rank": 3, "gpu_seconds": 0.0, "at_most_gpu_seconds": 720.0}
OPEN_ENDED = NUMBER | {"verdict_id": "open-ended", "rank": 4, "is_lower_bound": True}
USD_PER_HOUR = 6.88
BEGIN_MS, LENGTH_MS = cluster.T0_NS // 10**6, 100_000


@pytest.fixture
def asker_of(tmp_path):
    """Creates a client of a hub with these verdicts."""
    with cluster.hub_in(tmp_path) as hub:

        def context(*message: dict[str, Any], **machines: Any) -> TenantContext:
            same = {
                "cluster_id": "alpha",
                "node_id": "alpha-node-0",
                "state": "open",
                "kind": "straggler",
                "since_ns": BEGIN_MS * 10**6,
                "until_ns": (BEGIN_MS + LENGTH_MS) * 10**6,
            }
            rows = cluster.table("verdicts", [same | entry for entry in message])
            tables = {"verdicts": rows, "nodes": cluster.machines("alpha", **machines)}
            hub.store.append(Batch("", "a", tables)).result(timeout=30)
            return TenantContext(hub, "a")

        yield context


def usd(gpu_seconds: float) -> float:
    return round(gpu_seconds / 3600 * USD_PER_HOUR, 4)


def ends(cost: Any) -> tuple[Any, ...]:
    return cost.gpu_seconds, cost.at_most_gpu_seconds, cost.usd, cost.at_most_usd


def asked(context: TenantContext, **params: Any) -> Cost:
    return get_cost(context, CostParams(**params))


def test_numbers_have_no_upper_end(asker_of):
    cost = asked(asker_of(NUMBER))
    assert ends(cost) == (100.0, None, usd(100), None)
    assert ends(cost.rows[0]) == ends(cost)
    assert cost.summary == "1 incident cost $0.19 (100.0 GPU seconds)."


def test_a_sum_with_a_range_in_it_has_two_ends_and_the_largest_row_is_first(asker_of):
    cost = asked(asker_of(NUMBER, RANGE))
    assert ends(cost) == (136.0, 460.0, usd(136), usd(460)) and cost.is_lower_bound
    assert [(row.rank, *ends(row)) for row in cost.rows] == [
        (2, 36.0, 360.0, usd(36), usd(360)),
        (1, 100.0, None, usd(100), None),
    ]
    assert cost.summary == "2 incidents cost $0.26 to $0.88 (136.0 to 460.0 GPU seconds)."


def test_an_incident_with_a_lower_bound_of_zero_is_included(asker_of):
    cost = asked(asker_of(MAYBE))
    assert ends(cost) == (0.0, 720.0, 0.0, usd(720))
    assert cost.summary == "1 incident cost at most $1.38 (at most 720.0 GPU seconds)."


def test_an_incident_without_an_upper_end_leaves_the_sum_without(asker_of):
    cost = asked(asker_of(RANGE, OPEN_ENDED))
    assert ends(cost) == (136.0, None, usd(136), None) and cost.is_lower_bound
    assert cost.summary == "2 incidents cost at least $0.26 (at least 136.0 GPU seconds)."
    assert {row.rank: row.at_most_gpu_seconds for row in cost.rows} == {2: 360.0, 4: None}


def test_both_ends_count_by_their_share_within_the_window(asker_of):
    cost = asked(asker_of(RANGE), to=BEGIN_MS + LENGTH_MS // 4)
    assert ends(cost) == (9.0, 90.0, usd(9), usd(90))


def test_an_incident_without_a_price_has_both_bounds(asker_of):
    cost = asked(asker_of(RANGE, gpu="A GPU of tomorrow"))
    assert ends(cost) == (36.0, 360.0, None, None)
    (missing,) = cost.without_price
    assert (missing.gpu_seconds, missing.at_most_gpu_seconds) == (36.0, 360.0)
    assert cost.summary == (
        "1 incident cost 36.0 to 360.0 GPU seconds, in dollars an unknown amount. No price is known for "
        "A GPU of tomorrow at ec2: the cost excludes 36.0 to 360.0 GPU seconds."
    )


def test_verdicts_are_shown_with_the_ends_that_are_known(asker_of):
    context = asker_of(NUMBER, RANGE)
    sql = "SELECT verdict_id, gpu_seconds, at_most_gpu_seconds, at_most_usd FROM verdicts ORDER BY 1"
    result = run_analysis(context, AnalysisParams(sql=sql)).rows
    assert result == [["number", 100.0, None, None], ["range", 36.0, 360.0, None]]
    known = {"number": (100.0, None), "range": (36.0, 360.0)}
    for rows in (
        verdicts(context, VerdictsParams()).rows,
        summary(context, SummaryParams()).open_verdicts,
    ):
        assert {row["verdict_id"]: (row["gpu_seconds"], row["at_most_gpu_seconds"]) for row in rows} == known


def test_cost_names_jobs_whose_losses_are_unknown(asker_of):
    asker = asker_of(NUMBER)
    assert asked(asker).answer == "inconclusive"  # no job was examined
    times = {"begin_ns": BEGIN_MS * 10**6, "last_ns": (BEGIN_MS + LENGTH_MS) * 10**6}
    same = {"cluster_id": "alpha", "n_ranks": 8, "members": "[]", "evidence": "null"} | times
    reasons = '[{"reason": "4 of 8 ranks are not in this trace", "action": "Trace them."}]'
    rows = [
        same | {"job": "whole", "answer": "found", "reasons": "[]"},
        same | {"job": "partial", "answer": "inconclusive", "reasons": reasons},
    ]
    asker.hub.store.append(Batch("", "a", {"jobs": cluster.table("jobs", rows)})).result(timeout=30)
    cost = asked(asker)
    assert cost.summary.endswith("1 of 2 jobs inconclusive: a loss may be missing.")
    assert cost.answer == "found"


def test_no_cost_is_reported_as_zero_only_for_healthy_jobs(asker_of):
    asker = asker_of(NUMBER | {"gpu_seconds": 0.0})
    assert asked(asker).summary == "No lost GPU time is known. No job was examined in this time."
