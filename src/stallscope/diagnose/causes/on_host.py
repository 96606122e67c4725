"""Evidence for causes from host events: the file, the disk, the quota, the sender of a signal."""

import signal
from dataclasses import replace

import numpy as np

from stallscope.diagnose.causes._registry import Excess, most_of
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import HostKind, OffCpuFlag

_MAX_NAMED = 3
STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def quota(excess: Excess, off: Array) -> CauseEvidence:
    """The exhausted CPU quota, if it caused most of the rank's preempted time; empty otherwise.

    off: rows of OFFCPU.
    """
    by_quota = off["duration_ns"][off["flags"] & OffCpuFlag.THROTTLED > 0].sum()
    if 2 * by_quota <= off["duration_ns"].sum():
        return CauseEvidence()
    rows = excess.on_host(HostKind.THROTTLED)
    limits = texts(most_of(rows, "detail")) or ["its CPU quota"]
    groups = texts(most_of(rows, "file"))
    return CauseEvidence(quota=limits[0], control_group=groups[0] if groups else None)


def disks(excess: Excess) -> CauseEvidence:
    """The files and disks that the rank's threads waited for longest."""
    waits = excess.on_host(HostKind.FILE_WAIT, HostKind.MAJOR_FAULT)
    requests = excess.on_host(HostKind.BLOCK_IO)
    by_kernel = requests[(requests["by_pid"] != UNKNOWN) & (requests["by_pid"] != requests["pid"])]
    return CauseEvidence(
        files=_without_short(texts(most_of(waits, "file")))[:_MAX_NAMED] or None,
        devices=texts(most_of(np.concatenate([waits, requests]), "device"))[:_MAX_NAMED] or None,
        written_by=texts(most_of(by_kernel, "by_comm"))[:_MAX_NAMED] or None,
        n_major_faults=int((waits["kind"] == HostKind.MAJOR_FAULT).sum()) or None,
    )


def stopped_by(excess: Excess) -> CauseEvidence:
    """The senders of the signals that stopped the rank."""
    rows = excess.on_host(HostKind.SIGNAL)
    rows = rows[np.isin(rows["value"], STOPS)]
    if not len(rows):
        return CauseEvidence()
    senders = dict.fromkeys(sender(row) for row in rows)
    return CauseEvidence(stopped_by=list(senders)[:_MAX_NAMED], n_stops=len(rows))


def memory(excess: Excess) -> CauseEvidence:
    """The time that the rank spent in reclaim and compaction before it got memory."""
    return CauseEvidence(
        reclaim_ms=_spent_ms(excess.on_host(HostKind.RECLAIM)),
        compaction_ms=_spent_ms(excess.on_host(HostKind.COMPACTION)),
    )


def _spent_ms(rows: Array) -> float | None:
    return round(int(np.maximum(rows["duration_ns"], 0).sum()) / 1e6, 3) or None


def driver(excess: Excess) -> CauseEvidence:
    """The longest calls into the GPU driver; known where they were traced (trace --gpu-ioctls)."""
    names = texts(most_of(excess.on_host(HostKind.DRIVER_CALL), "detail"))[:_MAX_NAMED]
    return CauseEvidence(ioctls=[name.removeprefix("ioctl:") for name in names] or None)


def connections(excess: Excess) -> CauseEvidence:
    """The peers that the rank waited for on a socket, and its retransmits."""
    evidence = CauseEvidence(
        peers=texts(most_of(excess.on_host(HostKind.SOCKET_WAIT), "file"))[:_MAX_NAMED] or None
    )
    rows = excess.on_host(HostKind.RETRANSMIT)
    if not len(rows):
        return evidence
    return replace(
        evidence,
        n_retransmits=int(rows["value"].sum()),
        to=texts(most_of(rows, "file"))[:_MAX_NAMED],
        interfaces=texts(most_of(rows, "device"))[:_MAX_NAMED],
    )


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
