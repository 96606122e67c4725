"""Numbers of things in words."""

from stallscope.events.counted import counted, counted_reason


def test_a_number_has_its_word():
    assert counted(1, "rank") == "1 rank"
    assert counted(0, "rank") == "0 ranks"
    assert counted(12_000, "process") == "12,000 processes"
    assert counted(2, "copy", "copies") == "2 copies"


def test_a_reason_has_the_number_of_its_noun():
    reason = "events without a time or duration"
    assert counted_reason(1, reason) == "1 event without a time or duration"
    assert counted_reason(2000, reason) == "2,000 events without a time or duration"
    assert counted_reason(3, "dump cut off") == "3 dumps cut off"
    assert counted_reason(1, "further errors in logs") == "1 further error in logs"
    assert counted_reason(1, "NCCL logs cut off") == "1 NCCL log cut off"
    assert counted_reason(1, "statements on impossible ranks") == "1 statement on impossible ranks"
