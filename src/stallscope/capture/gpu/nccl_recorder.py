"""Records the operations of all processes of this machine that run NCCL's profiler plugin."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from stallscope.capture.gpu.nccl_ring import RECORD, NcclRing, recorded_events, ring_of
from stallscope.capture.gpu.nccl_trace import Recorded, nccl_trace
from stallscope.capture.gpu.shipped_libraries import shipped_library
from stallscope.events.trace import Clock, Trace

_DRAIN_S = 0.1
_LEASE_S = 2.0
_LAST_S = 0.2  # for the kernels in progress at the end
_NAME = "libnccl-profiler-stallscope.so"


def plugin_library() -> Path:
    """The plugin for this machine. Raises NotFound where it was not built."""
    return shipped_library(_NAME, "NCCL plugin")


def recorded_trace(pids: Sequence[int], *, seconds: float, node: str) -> Trace:
    """The operations of some processes, or of all processes with the plugin, during a time.

    A process that ends keeps its records. The trace has no process if none runs the plugin.
    """
    with ExitStack() as stack:
        rings = {
            pid: stack.enter_context(ring)
            for pid in pids or _process_ids()
            if (ring := ring_of(pid)) is not None
        }
        parts = _drained(rings, seconds)
        clock = Clock(0, time.monotonic_ns(), time.time_ns())
        recorded = {
            pid: Recorded(
                np.concatenate([np.empty(0, RECORD), *parts[pid]]),
                ring.communicators(),
                _name(pid),
                ring.n_lost + ring.n_dropped,
            )
            for pid, ring in rings.items()
        }
    return nccl_trace(recorded, node=node, clock=clock)


def _drained(rings: dict[int, NcclRing], seconds: float) -> dict[int, list[np.ndarray]]:
    """The records of all rings. Rings are switched on together, and off before the last records are read."""
    parts: dict[int, list[np.ndarray]] = {pid: [] for pid in rings}
    end = time.monotonic() + seconds
    while rings and (left := end - time.monotonic()) > 0:
        for pid, ring in rings.items():
            ring.switch(recorded_events(ring), seconds=min(_LEASE_S, left))
            parts[pid].append(ring.drain())
        time.sleep(min(_DRAIN_S, left))
    time.sleep(_LAST_S if rings else 0)
    for pid, ring in rings.items():
        parts[pid].append(ring.drain())
    return parts


def _process_ids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _name(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip()[:15]
    except OSError:
        return b""
