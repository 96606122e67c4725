"""The line of an incident has the attributes that the documentation lists."""

from stallscope.diagnose import Change, diagnose
from stallscope.live.incident_lines import ATTRIBUTES, incident_line

from ..diagnose.builders import MS, dp_trace, every
from ..diagnose.slack import slack_trace

RENAMED = {
    "nccl.comm_hash",
    "stallscope.lost_gpu_seconds",
    "stallscope.verdict.kind",
    "stallscope.waiting_ranks",
}
UPPER_END = "stallscope.at_most_gpu_seconds"


def test_a_line_has_the_documented_attributes_and_times_in_order():
    (verdict,) = diagnose(dp_trace(every(2, 7, 50 * MS))).verdicts
    line = incident_line(Change("closed", "abc", verdict, at_ns=5, reason="on time for 20 steps"))
    assert set(line["attributes"]) - RENAMED <= set(ATTRIBUTES)
    assert line["attributes"].keys() >= {"stallscope.kind", "stallscope.victims", "stallscope.gpu_seconds"}
    assert (line["state"], line["reason"]) == ("closed", "on time for 20 steps")
    assert line["attributes"]["stallscope.ranks"] == [2]
    assert (line["kind"], line["cause"]) == ("straggler", "host_sleep")
    assert line["begin_ns"] <= line["end_ns"]


def test_a_cost_that_is_a_range_has_both_ends():
    verdict = diagnose(slack_trace()).verdicts[0]
    told_of = incident_line(Change("closed", "abc", verdict, at_ns=5))["attributes"]
    assert verdict.cost.gpu_seconds < verdict.cost.at_most_gpu_seconds
    assert told_of["stallscope.gpu_seconds"] == verdict.cost.gpu_seconds
    assert told_of["stallscope.lost_gpu_seconds"] == verdict.cost.gpu_seconds  # until the next release
    assert told_of[UPPER_END] == verdict.cost.at_most_gpu_seconds
