"""Numbers of things in words."""

from stallscope.events.counted import counted


def test_a_number_has_its_word():
    assert counted(1, "rank") == "1 rank"
    assert counted(0, "rank") == "0 ranks"
    assert counted(12_000, "process") == "12,000 processes"
    assert counted(2, "copy", "copies") == "2 copies"
