"""The streams of one process: their number is bounded, in total and for each tenant."""

import pytest

from stallscope.continuous import streams
from stallscope.diagnose import Stream


def test_the_clusters_of_one_tenant_cannot_take_all_streams(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "_MAX_STREAMS", 4)
    made = streams.Streams(Stream)
    assert [made.feed(("a", f"c{number}"), {}) for number in range(5)] == [[], [], [], None, None]
    assert [made.feed(("b", f"c{number}"), {}) for number in range(2)] == [[], None]
    made.forget([("a", "c0")])
    assert made.feed(("b", "c1"), {}) == []
