"""How a process ended, the sender of the signal that stopped it, and its last failed call, from host events."""

import signal

import numpy as np

from stallscope.diagnose.causes.on_host import STOPS, sender
from stallscope.diagnose.evidence_fields import RankActivity
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import BY_SIGNAL, HostKind
from stallscope.events.trace import Trace

ASK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a process to end."""

JUST_BEFORE_NS = 5_000_000_000
"""A signal within this time before an end may be the reason for the end."""

_NOT_READY = 600  # cudaErrorNotReady, CUDA_ERROR_NOT_READY: a normal result


def end(events: Array, node: int, pid: int) -> RankActivity:
    """exit_status, ended_by as text, and oom_killed after an out-of-memory kill; empty without an exit event.

    events: rows of HOST_EVENTS. exit_status: as in a shell.
    """
    of_process = events[(events["node"] == node) & (events["pid"] == pid)]
    exits = of_process[of_process["kind"] == HostKind.EXIT]
    killed = of_process[of_process["kind"] == HostKind.OOM_KILL]
    if len(killed):
        by = (
            f", while {sender(killed[-1])} asked for memory"
            if killed["by_pid"][-1] not in (pid, UNKNOWN)
            else ""
        )
        return RankActivity(
            exit_status=BY_SIGNAL + signal.SIGKILL,
            oom_killed=True,
            ended_by=f"the kernel's out-of-memory killer{by}",
        )
    if not len(exits):
        return RankActivity()
    status = int(exits["value"][-1])
    if status != 0 and (child := killed_child(events, node, pid, until_ns=int(exits["ts_ns"][-1]))):
        return RankActivity(
            exit_status=status,
            oom_killed=True,
            ended_by=f"the loss of {child}, which the kernel's out-of-memory killer ended",
        )
    if status <= BY_SIGNAL:
        return RankActivity(
            exit_status=status, exit_requested_by=_exit_requested_by(of_process, int(exits["ts_ns"][-1]))
        )
    number = status - BY_SIGNAL
    sent = of_process[(of_process["kind"] == HostKind.SIGNAL) & (of_process["value"] == number)]
    sent = sent[sent["ts_ns"] >= exits["ts_ns"][-1] - JUST_BEFORE_NS]
    by = _from(sent[-1], pid) if len(sent) else ""
    return RankActivity(exit_status=status, ended_by=f"{signal_name(number)}{by}")


def killed_child(events: Array, node: int, pid: int, *, until_ns: int) -> str | None:
    """The last process that the rank had started, and that an out-of-memory kill ended: name and pid; None without any.

    A data loader's worker, for example: its rank fails when it waits for the next batch.
    """
    here = events[(events["node"] == node) & (events["ts_ns"] <= until_ns)]
    forks = here[here["kind"] == HostKind.FORK]
    family, children = {pid}, {pid}
    while children:
        children = set(forks["pid"][np.isin(forks["by_pid"], list(children))].tolist()) - family
        family |= children
    killed = here[(here["kind"] == HostKind.OOM_KILL) & np.isin(here["pid"], list(family - {pid}))]
    if not len(killed):
        return None
    name = killed["comm"][-1].decode("utf-8", "replace") or "a process"
    return f"its child {name} (pid {killed['pid'][-1]})"


def _exit_requested_by(of_process: Array, end_ns: int) -> str | None:
    """The signal that a process received before it exited itself, for example from Ctrl-C."""
    sent = of_process[(of_process["kind"] == HostKind.SIGNAL) & np.isin(of_process["value"], ASK)]
    sent = sent[(sent["ts_ns"] >= end_ns - JUST_BEFORE_NS) & (sent["ts_ns"] <= end_ns)]
    return f"{signal_name(int(sent['value'][-1]))} from {sender(sent[-1])}" if len(sent) else None


def stopped_by(events: Array, node: int, pid: int) -> str | None:
    """The signal that stopped the process and its sender; None if it is not stopped."""
    of_process = events[
        (events["node"] == node) & (events["pid"] == pid) & (events["kind"] == HostKind.SIGNAL)
    ]
    of_process = of_process[np.isin(of_process["value"], (*STOPS, signal.SIGCONT))]
    if not len(of_process) or of_process["value"][-1] == signal.SIGCONT:
        return None
    return f"{signal_name(int(of_process['value'][-1]))} from {sender(of_process[-1])}"


def failed_call(trace: Trace, node: int, pid: int, *, after_ns: int) -> RankActivity:
    """failed_call, error: the last failed call of a process, if it returned after after_ns on the node's clock."""
    calls = trace.calls
    of_process = calls[(calls["node"] == node) & (calls["pid"] == pid) & (calls["duration_ns"] != UNKNOWN)]
    of_process = of_process[(of_process["result"] > 0) & (of_process["result"] != _NOT_READY)]
    of_process = of_process[of_process["ts_ns"] + of_process["duration_ns"] >= after_ns]
    if not len(of_process):
        return RankActivity()
    last = of_process[np.argmax(of_process["ts_ns"])]
    number = int(last["symbol"])
    function = trace.symbols[number] if number < len(trace.symbols) else ""
    return RankActivity(failed_call=function or "a call", error=int(last["result"]))


def signal_name(number: int) -> str:
    """The name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _from(row: Array, pid: int) -> str:
    """The sender of a signal as text; empty for a signal from the process itself or the kernel, such as an abort."""
    return "" if row["by_pid"] in (pid, UNKNOWN) else f" from {sender(row)}"
