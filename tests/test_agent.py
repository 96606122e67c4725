"""The agent without a kernel: read access, and the destination of raw events. The rest is in tests/live."""

from pathlib import Path

import pytest

from stallscope import agent


@pytest.mark.parametrize(
    ("expected", "group"), [("1000", 1000), ("", None), ("-1", None), ("staff", None), (None, None)]
)
def test_the_trace_group_is_the_group_of_the_sudo_user(monkeypatch, expected, group):
    monkeypatch.delenv("SUDO_GID", raising=False)
    if expected is not None:
        monkeypatch.setenv("SUDO_GID", expected)
    assert agent._group_of_the_user() == group


def test_raw_events_are_stored_next_to_the_trace():
    assert agent.raw_path(Path("/var/lib/stallscope/trace.db")) == Path("/var/lib/stallscope/trace.db.raw")
