"""What the page says of a job that stood still before the trace began."""

from tests.diagnose.test_already_still import SLEEPS, WAITS, trace

from stallscope.diagnose.thresholds import Thresholds
from stallscope.live.standstill import Standstill
from stallscope.store import node


def test_the_page_tells_who_is_likely_waited_for_until_there_are_rounds(tmp_path):
    db = tmp_path / "trace.db"
    node.write(db, trace(WAITS, SLEEPS, WAITS))
    page = Standstill(db, Thresholds())
    said = page.verdict(has_rounds=False)
    assert said is not None and not said.is_over
    assert "likely wait for rank 1" in said.summary
    assert page.verdict(has_rounds=True) is None


def test_the_page_says_nothing_before_it_has_lasted(tmp_path):
    db = tmp_path / "trace.db"
    node.write(db, trace(WAITS, SLEEPS, WAITS, looks_s=(3, 8)))
    assert Standstill(db, Thresholds()).verdict(has_rounds=False) is None
