"""Services end when a signal asks, and leave signals as they were."""

import os
import signal
import threading

import pytest

from stallscope import agent
from stallscope.ending import set_by_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_for_the_end_and_nothing_else(number):
    stop = threading.Event()
    before = signal.getsignal(number)
    with set_by_signals(stop, agent._SIGNALS):
        os.kill(os.getpid(), number)
        assert stop.wait(1)
    assert signal.getsignal(number) == before


def test_signals_are_left_alone_outside_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with set_by_signals(threading.Event(), agent._SIGNALS):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
