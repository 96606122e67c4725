"""How a process ended, or who has stopped it, by what its machine told; and the call that failed before."""

import signal

import numpy as np

from stallscope.diagnose.causes.on_host import STOPS, sender
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import BY_SIGNAL, HostKind
from stallscope.events.trace import Trace

ASK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals by which somebody asks a process to end."""

JUST_BEFORE_NS = 5_000_000_000
"""A signal that came so long before an end may have been its reason."""

_NOT_READY = 600  # cudaErrorNotReady, CUDA_ERROR_NOT_READY: an answer, no error


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
            "exit_status": BY_SIGNAL + signal.SIGKILL,
            "oom_killed": True,
            "ended_by": f"the kernel's out-of-memory killer{by}",
        }
    if not len(exits):
        return {}
    status = int(exits["value"][-1])
    told: dict[str, object] = {"exit_status": status}
    if status <= BY_SIGNAL:
        return told | _asked(mine, int(exits["ts_ns"][-1]))
    number = status - BY_SIGNAL
    sent = mine[(mine["kind"] == HostKind.SIGNAL) & (mine["value"] == number)]
    sent = sent[sent["ts_ns"] >= exits["ts_ns"][-1] - JUST_BEFORE_NS]
    by = _by_whom(sent[-1], pid) if len(sent) else ""
    return told | {"ended_by": f"{name(number)}{by}"}


def _asked(mine: Array, end_ns: int) -> dict[str, object]:
    """asked_by: the signal that a process had got when it ended by itself, as Ctrl-C sends one."""
    sent = mine[(mine["kind"] == HostKind.SIGNAL) & np.isin(mine["value"], ASK)]
    sent = sent[(sent["ts_ns"] >= end_ns - JUST_BEFORE_NS) & (sent["ts_ns"] <= end_ns)]
    return {"asked_by": f"{name(int(sent['value'][-1]))} from {sender(sent[-1])}"} if len(sent) else {}


def stopped(events: Array, node: int, pid: int) -> dict[str, object]:
    """stopped_by: who sent the signal that has stopped it; empty where nobody did, or it was continued."""
    mine = events[(events["node"] == node) & (events["pid"] == pid) & (events["kind"] == HostKind.SIGNAL)]
    mine = mine[np.isin(mine["value"], (*STOPS, signal.SIGCONT))]
    if not len(mine) or mine["value"][-1] == signal.SIGCONT:
        return {}
    return {"stopped_by": f"{name(int(mine['value'][-1]))} from {sender(mine[-1])}"}


def failed_call(trace: Trace, node: int, pid: int, *, after_ns: int) -> dict[str, object]:
    """failed_call, error: the last call that a process made in vain, if it returned after some time on its clock."""
    calls = trace.calls
    mine = calls[(calls["node"] == node) & (calls["pid"] == pid) & (calls["duration_ns"] != UNKNOWN)]
    mine = mine[(mine["result"] > 0) & (mine["result"] != _NOT_READY)]
    mine = mine[mine["ts_ns"] + mine["duration_ns"] >= after_ns]
    if not len(mine):
        return {}
    last = mine[np.argmax(mine["ts_ns"])]
    number = int(last["symbol"])
    function = trace.symbols[number] if number < len(trace.symbols) else ""
    return {"failed_call": function or "a call", "error": int(last["result"])}


def name(number: int) -> str:
    """The name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _by_whom(row: Array, pid: int) -> str:
    """A signal from the process itself, or from the kernel, is a fault of its own: an abort, an illegal access."""
    return "" if row["by_pid"] in (pid, UNKNOWN) else f" from {sender(row)}"
