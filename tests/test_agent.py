"""What the agent does without a kernel: signals, who may read, where raw events go. The rest is in tests/live."""

import os
import signal
import threading
from pathlib import Path

import pytest

from stallscope import agent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_for_the_end_and_nothing_else(number):
    stop = threading.Event()
    before = signal.getsignal(number)
    with agent._set_by_signals(stop):
        os.kill(os.getpid(), number)
        assert stop.wait(1)
    assert signal.getsignal(number) == before


def test_signals_are_left_alone_outside_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with agent._set_by_signals(threading.Event()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize(
    ("told", "group"), [("1000", 1000), ("", None), ("-1", None), ("staff", None), (None, None)]
)
def test_the_group_is_that_of_the_user_who_called_sudo(monkeypatch, told, group):
    monkeypatch.delenv("SUDO_GID", raising=False)
    if told is not None:
        monkeypatch.setenv("SUDO_GID", told)
    assert agent._group_of_the_user() == group


def test_raw_events_lie_beside_the_trace():
    assert agent.raw_path(Path("/var/lib/stallscope/trace.db")) == Path("/var/lib/stallscope/trace.db.raw")
