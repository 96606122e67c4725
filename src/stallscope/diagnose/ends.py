"""How a process ended, or who has stopped it, by what its machine told."""

import signal

import numpy as np

from stallscope.diagnose.causes.on_host import STOPS, sender
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import HostKind

_BY_SIGNAL = 128
_JUST_BEFORE_NS = 5_000_000_000


def end(events: Array, node: int, pid: int) -> dict[str, object]:
    """exit_status, ended_by in words, and oom_killed where it was that; empty where nothing was told.

    events: rows of HOST_EVENTS. exit_status: as a shell says it.
    """
    mine = events[(events["node"] == node) & (events["pid"] == pid)]
    exits = mine[mine["kind"] == HostKind.EXIT]
    killed = mine[mine["kind"] == HostKind.OOM_KILL]
    if len(killed):
        by = (
            f", while {sender(killed[-1])} asked for memory"
            if killed["by_pid"][-1] not in (pid, UNKNOWN)
            else ""
        )
        return {
            "exit_status": _BY_SIGNAL + signal.SIGKILL,
            "oom_killed": True,
            "ended_by": f"the kernel's out-of-memory killer{by}",
        }
    if not len(exits):
        return {}
    status = int(exits["value"][-1])
    told: dict[str, object] = {"exit_status": status}
    if status <= _BY_SIGNAL:
        return told
    number = status - _BY_SIGNAL
    sent = mine[(mine["kind"] == HostKind.SIGNAL) & (mine["value"] == number)]
    sent = sent[sent["ts_ns"] >= exits["ts_ns"][-1] - _JUST_BEFORE_NS]
    by = _by_whom(sent[-1], pid) if len(sent) else ""
    return told | {"ended_by": f"{name(number)}{by}"}


def stopped(events: Array, node: int, pid: int) -> dict[str, object]:
    """stopped_by: who sent the signal that has stopped it; empty where nobody did, or it was continued."""
    mine = events[(events["node"] == node) & (events["pid"] == pid) & (events["kind"] == HostKind.SIGNAL)]
    mine = mine[np.isin(mine["value"], (*STOPS, signal.SIGCONT))]
    if not len(mine) or mine["value"][-1] == signal.SIGCONT:
        return {}
    return {"stopped_by": f"{name(int(mine['value'][-1]))} from {sender(mine[-1])}"}


def name(number: int) -> str:
    """The name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _by_whom(row: Array, pid: int) -> str:
    """A signal from the process itself, or from the kernel, is a fault of its own: an abort, an illegal access."""
    return "" if row["by_pid"] in (pid, UNKNOWN) else f" from {sender(row)}"
