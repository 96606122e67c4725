"""What the machine's own events say about a cause: the file, the disk, the quota, the sender of a signal."""

import signal

import numpy as np

from stallscope.diagnose.causes._registry import Evidence, Excess, most_of
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import HostKind, OffCpuFlag

_MOST_NAMED = 3
STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def quota(excess: Excess, off: Array) -> Evidence:
    """The CPU quota that was used up, when that took most of the time in which the rank was kept off the CPU.

    off: rows of OFFCPU.
    """
    by_quota = off["duration_ns"][off["flags"] & OffCpuFlag.THROTTLED > 0].sum()
    if 2 * by_quota <= off["duration_ns"].sum():
        return {}
    rows = excess.on_host(HostKind.THROTTLED)
    limits = texts(most_of(rows, "detail"))[:1]
    groups = texts(most_of(rows, "file"))[:1]
    told: Evidence = {"quota": limits[0] if limits else "its CPU quota"}
    return told | ({"control_group": groups[0]} if groups else {})


def disks(excess: Excess) -> Evidence:
    """The files and disks that the rank's threads waited for longest; how slow the disks were at most."""
    waits = excess.on_host(HostKind.FILE_WAIT, HostKind.MAJOR_FAULT)
    requests = excess.on_host(HostKind.BLOCK_IO)
    told: Evidence = {}
    if files := texts(most_of(waits, "file")):
        told["files"] = _without_short(files)[:_MOST_NAMED]
    if devices := texts(most_of(np.concatenate([waits, requests]), "device"))[:_MOST_NAMED]:
        told["devices"] = devices
    by_kernel = requests[(requests["by_pid"] != UNKNOWN) & (requests["by_pid"] != requests["pid"])]
    if writers := texts(most_of(by_kernel, "by_comm"))[:_MOST_NAMED]:
        told["written_by"] = writers
    if n := int((waits["kind"] == HostKind.MAJOR_FAULT).sum()):
        told["n_major_faults"] = n
    return told


def stopped_by(excess: Excess) -> Evidence:
    """Who sent the signals that stopped the rank."""
    rows = excess.on_host(HostKind.SIGNAL)
    rows = rows[np.isin(rows["value"], STOPS)]
    if not len(rows):
        return {}
    senders = dict.fromkeys(sender(row) for row in rows)
    return {"stopped_by": list(senders)[:_MOST_NAMED], "n_stops": len(rows)}


def memory(excess: Excess) -> Evidence:
    """What the rank had to do before it got memory."""
    told: Evidence = {}
    for name, kind in (("reclaim", HostKind.RECLAIM), ("compaction", HostKind.COMPACTION)):
        rows = excess.on_host(kind)
        if ns := int(np.maximum(rows["duration_ns"], 0).sum()):
            told[f"{name}_ms"] = round(ns / 1e6, 3)
    return told


def driver(excess: Excess) -> Evidence:
    """Which calls into the GPU driver took longest; known where they were traced (trace --gpu-ioctls)."""
    names = texts(most_of(excess.on_host(HostKind.DRIVER_CALL), "detail"))[:_MOST_NAMED]
    return {"ioctls": [name.removeprefix("ioctl:") for name in names]} if names else {}


def connections(excess: Excess) -> Evidence:
    """Whom the rank waited for on a socket, and what had to be sent again."""
    told: Evidence = {}
    if peers := texts(most_of(excess.on_host(HostKind.SOCKET_WAIT), "file"))[:_MOST_NAMED]:
        told["peers"] = peers
    rows = excess.on_host(HostKind.RETRANSMIT)
    if len(rows):
        told["n_retransmits"] = int(rows["value"].sum())
        told["to"] = texts(most_of(rows, "file"))[:_MOST_NAMED]
        told["interfaces"] = texts(most_of(rows, "device"))[:_MOST_NAMED]
    return told


def sender(row: Array) -> str:
    """Who sent a signal, as a row of HOST_EVENTS tells it."""
    if row["by_pid"] == UNKNOWN:
        return "the kernel"
    name = row["by_comm"].item().decode("utf-8", "replace")
    return f"{name} (pid {int(row['by_pid'])})"


def _without_short(files: list[str]) -> list[str]:
    """Without names whose path is there too: a file that was closed is known by its name only, perhaps cut."""
    ends = [path.rpartition("/")[2] for path in files if "/" in path]
    return [one for one in files if "/" in one or not any(end.startswith(one) for end in ends)]


def texts(values: Array) -> list[str]:
    """As text; what is empty is left out."""
    return [one.decode("utf-8", "replace") for one in values.tolist() if one]
