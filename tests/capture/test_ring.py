"""The ring's records as arrays, with the real kernel as producer."""

import select
from collections.abc import Callable

import numpy as np
import pytest

from stallscope.capture.probes.program import Program
from stallscope.capture.probes.ring import Ring
from stallscope.events import kernel

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

SMALL = 1 << 16
CALL = "lib.ncclAllReduce(P(0), P(0), Z({n}), 7, 0, P(99), P(0))"


def calls(n: int, count: str = "i") -> str:
    return f"[{CALL.format(n=count)} for i in range({n})]"


def test_records_come_in_order_over_many_turns_of_the_ring(tracing: Callable[..., Program], puppet):
    program = tracing(ring_bytes=SMALL)
    result = [program.arrivals.drain()]
    for _ in range(30):
        puppet.does(calls(200))
        result.append(program.arrivals.drain())
    arrivals = np.concatenate(result)
    assert program.losses()["lost_arrival"] == 0
    assert arrivals["seq"].tolist() == list(range(6000))
    assert arrivals["count"].tolist() == list(range(200)) * 30
    assert (np.diff(arrivals["ts_ns"]) > 0).all()


def test_a_drain_returns_at_most_the_given_number_of_records(tracing: Callable[..., Program], puppet):
    program = tracing(ring_bytes=SMALL)
    puppet.does(calls(100))
    assert len(program.arrivals.drain(30)) == 30
    assert program.arrivals.fill() == pytest.approx(70 * 256 / SMALL)
    assert len(program.arrivals.drain()) == 70
    assert len(program.arrivals.drain()) == 0


def test_a_ring_is_readable_when_a_quarter_of_it_is_in_use(tracing: Callable[..., Program], puppet):
    ring = tracing(ring_bytes=SMALL).arrivals
    n_quarter = SMALL // 256 // 4
    with select.epoll() as ready:
        ready.register(ring.fd, select.EPOLLIN | select.EPOLLET)
        for _ in range(3):
            puppet.does(calls(n_quarter - 1))
            assert ready.poll(0) == []
            puppet.does(calls(2))
            assert ready.poll(60) == [(ring.fd, select.EPOLLIN)]
            ring.drain()
            ready.poll(0)


def test_drained_records_outlive_the_ring(tracing: Callable[..., Program], puppet):
    program = tracing(ring_bytes=SMALL)
    puppet.does(calls(250))
    kept = program.arrivals.drain()
    puppet.does(calls(250, "7"))
    program.close()
    assert kept["count"].tolist() == list(range(250))


@pytest.mark.pure
def test_a_record_that_straddles_the_end_is_refused():
    with pytest.raises(ValueError, match="do not divide"):
        Ring(-1, np.dtype([("a", "u1", (100,))]), 4096)
    assert kernel.ARRIVAL.itemsize + 8 == 256
