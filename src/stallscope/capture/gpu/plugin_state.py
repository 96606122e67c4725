"""The state of NCCL's profiler plugin in each process: whether it is loaded, follows the agent, and records.

Reading the state changes nothing for another reader. A process of another user is not readable without privileges.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stallscope.capture.gpu.nccl_ring import NcclRing, RingComm, ring_of


@dataclass(frozen=True)
class PluginState:
    """The plugin in one process. n_records: since the start of NCCL; n_dropped: events without a free slot."""

    pid: int
    name: str
    communicators: tuple[RingComm, ...]
    is_recording: bool
    has_thread: bool
    n_events: int
    n_records: int
    n_dropped: int

    @property
    def rank(self) -> int:
        """The rank in the largest open communicator; -1 without one."""
        comms = [comm for comm in self.communicators if comm.is_open]
        return max(comms, key=lambda comm: comm.n_ranks).rank if comms else -1


def plugin_states(pids: Iterable[int] = (), proc: Path = Path("/proc")) -> list[PluginState]:
    """The state in these processes, or in all processes; without processes that have not loaded the plugin."""
    chosen = list(pids) or sorted(int(path.name) for path in proc.iterdir() if path.name.isdecimal())
    states = []
    for pid in chosen:
        if (ring := ring_of(pid, proc)) is None:
            continue
        states.append(_state(pid, ring, proc))
        ring.release()
    return states


def _state(pid: int, ring: NcclRing, proc: Path) -> PluginState:
    try:
        name = (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        name = ""
    return PluginState(
        pid=pid,
        name=name,
        communicators=tuple(ring.communicators()),
        is_recording=bool(ring.active),
        has_thread=ring.has_thread,
        n_events=ring.n_events,
        n_records=ring.n_written,
        n_dropped=ring.n_dropped,
    )
