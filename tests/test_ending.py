"""Services end when a signal asks, and leave signals as they were."""

import os
import select
import signal
import threading

import pytest

from stallscope import agent
from stallscope.ending import set_by_signals, signal_descriptor


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_sets_the_stop_event_and_handlers_are_restored(number):
    stop = threading.Event()
    before = signal.getsignal(number)
    with set_by_signals(stop, agent._SIGNALS):
        os.kill(os.getpid(), number)
        assert stop.wait(1)
    assert signal.getsignal(number) == before


def test_the_signal_descriptor_becomes_readable_on_a_signal():
    before = signal.set_wakeup_fd(-1)
    stop = threading.Event()
    with set_by_signals(stop), signal_descriptor() as reading:
        assert select.select([reading], [], [], 0)[0] == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([reading], [], [], 60)[0] == [reading]
        assert stop.is_set()
    assert signal.set_wakeup_fd(before) == -1


def test_signals_are_left_alone_outside_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    observed = []

    def run() -> None:
        with set_by_signals(threading.Event(), agent._SIGNALS):
            observed.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert observed == [before]
