"""The line that tells an incident has the attributes that the documentation lists."""

from stallscope.diagnose.engine import diagnose
from stallscope.live.incidents import ATTRIBUTES, told

from ..diagnose.builders import MS, dp_trace, every


def test_a_line_has_the_documented_attributes_and_times_in_order():
    (verdict,) = diagnose(dp_trace(every(2, 7, 50 * MS))).verdicts
    line = told("closed", "abc", verdict, at_ns=5)
    assert set(line["attributes"]) == set(ATTRIBUTES)
    assert line["attributes"]["stallscope.ranks"] == [2]
    assert (line["kind"], line["cause"]) == ("straggler", "host_sleep")
    assert line["begin_ns"] <= line["end_ns"]
