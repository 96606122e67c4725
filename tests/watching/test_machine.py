"""Actions of the machine, as lines for the page."""

import signal
from typing import Any

from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.names import HostKind
from stallscope.live.host_events import MAX_LINES, lines

MS = 1_000_000
PROCESSES = {(0, 7): (2, "python"), (0, 8): (-1, "server")}


def rows(*output: dict[str, Any]) -> Array:
    out = layout.empty(layout.HOST_EVENTS, len(output))
    for row, entry in zip(out, output, strict=True):
        for name, value in {"pid": 7, **entry}.items():
            row[name] = value
    return out


STOP = {"kind": HostKind.SIGNAL, "value": signal.SIGSTOP, "by_pid": 9, "by_comm": b"bash"}
KILLED = {"kind": HostKind.OOM_KILL}, {"kind": HostKind.EXIT, "value": 137}
QUOTA = {"kind": HostKind.THROTTLED, "value": 9, "file": b"/pod", "detail": b"cpu.max 50000/100000"}
WAIT = {"kind": HostKind.FILE_WAIT, "duration_ns": 80 * MS, "device": b"sda1", "file": b"/ckpt"}
RESENT = {"kind": HostKind.RETRANSMIT, "value": 4, "file": b"10.0.0.9:22"}
DRIVER = {"kind": HostKind.DRIVER_CALL, "duration_ns": 120 * MS, "detail": b"ioctl:NV_ESC_RM_CONTROL"}
RECLAIM = {"kind": HostKind.RECLAIM, "duration_ns": 70 * MS}


def test_each_is_a_line():
    assert lines(rows(STOP), PROCESSES) == ["rank 2 got SIGSTOP from bash (pid 9)"]
    assert lines(rows(*KILLED), PROCESSES) == ["rank 2 was ended by the kernel's out-of-memory killer"]
    assert lines(rows(QUOTA), PROCESSES) == ["CPU quota of /pod used up 9 times (cpu.max 50000/100000)"]
    assert lines(rows(WAIT | {"pid": 8}), PROCESSES) == ["server 8 waited 80 ms for sda1 (/ckpt)"]
    assert lines(rows(RESENT, RESENT), PROCESSES) == ["8 TCP retransmits, most of rank 2 to 10.0.0.9:22"]
    assert lines(rows(DRIVER), PROCESSES) == ["rank 2 was in the GPU driver for 120 ms (NV_ESC_RM_CONTROL)"]
    assert lines(rows(RECLAIM), PROCESSES) == ["rank 2 spent 70 ms reclaiming memory"]


def test_little_delays_strangers_and_usual_ends_are_none():
    small = (
        WAIT | {"duration_ns": 3 * MS},
        DRIVER | {"duration_ns": 9 * MS},
        RECLAIM | {"duration_ns": MS},
        {"kind": HostKind.EXIT, "value": 0},
    )
    assert not lines(rows(*small, STOP | {"pid": 4242}), PROCESSES)
    assert not lines(rows(), PROCESSES)


def test_there_are_few_and_ends_come_first():
    message = lines(rows(RESENT, RECLAIM, WAIT, QUOTA, STOP, *KILLED), PROCESSES)
    assert len(message) == MAX_LINES and "out-of-memory" in message[0]
