"""Evidence for causes from host events: the file, the disk, the quota, the sender of a signal."""

import signal

import numpy as np

from stallscope.diagnose.causes._registry import Evidence, Excess, most_of
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import HostKind, OffCpuFlag

_MOST_NAMED = 3
STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def quota(excess: Excess, off: Array) -> Evidence:
    """The exhausted CPU quota, if it caused most of the rank's preempted time; empty otherwise.

    off: rows of OFFCPU.
    """
    by_quota = off["duration_ns"][off["flags"] & OffCpuFlag.THROTTLED > 0].sum()
    if 2 * by_quota <= off["duration_ns"].sum():
        return {}
    rows = excess.on_host(HostKind.THROTTLED)
    limits = texts(most_of(rows, "detail"))[:1]
    groups = texts(most_of(rows, "file"))[:1]
    evidence: Evidence = {"quota": limits[0] if limits else "its CPU quota"}
    return evidence | ({"control_group": groups[0]} if groups else {})


def disks(excess: Excess) -> Evidence:
    """The files and disks that the rank's threads waited for longest."""
    waits = excess.on_host(HostKind.FILE_WAIT, HostKind.MAJOR_FAULT)
    requests = excess.on_host(HostKind.BLOCK_IO)
    evidence: Evidence = {}
    if files := texts(most_of(waits, "file")):
        evidence["files"] = _without_short(files)[:_MOST_NAMED]
    if devices := texts(most_of(np.concatenate([waits, requests]), "device"))[:_MOST_NAMED]:
        evidence["devices"] = devices
    by_kernel = requests[(requests["by_pid"] != UNKNOWN) & (requests["by_pid"] != requests["pid"])]
    if writers := texts(most_of(by_kernel, "by_comm"))[:_MOST_NAMED]:
        evidence["written_by"] = writers
    if n := int((waits["kind"] == HostKind.MAJOR_FAULT).sum()):
        evidence["n_major_faults"] = n
    return evidence


def stopped_by(excess: Excess) -> Evidence:
    """The senders of the signals that stopped the rank."""
    rows = excess.on_host(HostKind.SIGNAL)
    rows = rows[np.isin(rows["value"], STOPS)]
    if not len(rows):
        return {}
    senders = dict.fromkeys(sender(row) for row in rows)
    return {"stopped_by": list(senders)[:_MOST_NAMED], "n_stops": len(rows)}


def memory(excess: Excess) -> Evidence:
    """The time that the rank spent in reclaim and compaction before it got memory."""
    evidence: Evidence = {}
    for name, kind in (("reclaim", HostKind.RECLAIM), ("compaction", HostKind.COMPACTION)):
        rows = excess.on_host(kind)
        if ns := int(np.maximum(rows["duration_ns"], 0).sum()):
            evidence[f"{name}_ms"] = round(ns / 1e6, 3)
    return evidence


def driver(excess: Excess) -> Evidence:
    """The longest calls into the GPU driver; known where they were traced (trace --gpu-ioctls)."""
    names = texts(most_of(excess.on_host(HostKind.DRIVER_CALL), "detail"))[:_MOST_NAMED]
    return {"ioctls": [name.removeprefix("ioctl:") for name in names]} if names else {}


def connections(excess: Excess) -> Evidence:
    """The peers that the rank waited for on a socket, and its retransmits."""
    evidence: Evidence = {}
    if peers := texts(most_of(excess.on_host(HostKind.SOCKET_WAIT), "file"))[:_MOST_NAMED]:
        evidence["peers"] = peers
    rows = excess.on_host(HostKind.RETRANSMIT)
    if len(rows):
        evidence["n_retransmits"] = int(rows["value"].sum())
        evidence["to"] = texts(most_of(rows, "file"))[:_MOST_NAMED]
        evidence["interfaces"] = texts(most_of(rows, "device"))[:_MOST_NAMED]
    return evidence


def sender(row: Array) -> str:
    """The sender of a signal, from a row of HOST_EVENTS."""
    if row["by_pid"] == UNKNOWN:
        return "the kernel"
    name = row["by_comm"].item().decode("utf-8", "replace")
    return f"{name} (pid {int(row['by_pid'])})"


def _without_short(files: list[str]) -> list[str]:
    """The files without bare names whose path is listed as well. A closed file has only a name, perhaps truncated."""
    ends = [path.rpartition("/")[2] for path in files if "/" in path]
    return [file for file in files if "/" in file or not any(end.startswith(file) for end in ends)]


def texts(values: Array) -> list[str]:
    """The values that are not empty, as text."""
    return [value.decode("utf-8", "replace") for value in values.tolist() if value]
