"""The capabilities that the agent keeps once its programs are loaded; it gives up all others.

The kernel drops capabilities of one thread, and threads and processes started by that thread have no more than it. So
the drop comes after the load and before the first thread. The remaining capabilities are enough to attach to libraries
that are mapped later. capabilities(7); linux/capability.h for the numbers and the layout, version 3 (since 2.6.26).
"""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from stallscope.capture.probes.preflight import Capability, effective_capabilities
from stallscope.errors import CannotTrace

ALWAYS_NEEDED = frozenset(
    {
        Capability.CAP_BPF,
        Capability.CAP_PERFMON,
        Capability.CAP_SYS_PTRACE,
        Capability.CAP_DAC_READ_SEARCH,
        Capability.CAP_CHECKPOINT_RESTORE,
    }
)
"""The attach methods with multi links (Linux 6.6 and later)."""

_FIRST_FREE_PORT = 1024
_VERSION_3 = 0x20080522
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24


def needed_capabilities(
    held: frozenset[int],
    mode: str,
    *,
    written_paths: Iterable[Path] = (),
    ports: Iterable[int] = (),
    chowns: bool,
) -> frozenset[int]:
    """The members of `held` that the agent needs from now on.

    mode: the attach method (program.MODES); single uprobes need CAP_SYS_ADMIN. written_paths: files and folders to
    write to. ports: ports to listen at. chowns: files are given to a group of which we may not be a member.
    """
    needed: set[int] = set(ALWAYS_NEEDED)
    if mode == "perf" or not held >= (
        ALWAYS_NEEDED - {Capability.CAP_SYS_PTRACE, Capability.CAP_DAC_READ_SEARCH}
    ):
        needed.add(Capability.CAP_SYS_ADMIN)
    if Capability.CAP_DAC_READ_SEARCH not in held:
        needed.add(Capability.CAP_DAC_OVERRIDE)
    if not all(map(_is_writable, written_paths)):  # new files there are given to the folder's owner
        needed |= {Capability.CAP_DAC_OVERRIDE, Capability.CAP_CHOWN}
    if any(0 < port < _FIRST_FREE_PORT for port in ports):
        needed.add(Capability.CAP_NET_BIND_SERVICE)
    if chowns:
        needed.add(Capability.CAP_CHOWN)
    return held & needed


def held_capabilities(proc: Path = Path("/proc")) -> frozenset[int]:
    """The capabilities of this process, as its first thread has them."""
    mask = effective_capabilities(proc)
    return frozenset(bit for bit in range(64) if mask >> bit & 1)


def drop_all_but(capabilities: frozenset[int]) -> None:
    """Limit this thread, and everything it starts, to these capabilities; irreversible.

    A program that it starts inherits the capability for low ports, if any, and as root all of these. Raises
    CannotTrace.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # Without CAP_SETPCAP the parent has to limit the capabilities that an exec can regain.
    if Capability.CAP_SETPCAP in held_capabilities():
        for bit in range(64):
            if bit not in capabilities and libc.prctl(_PR_CAPBSET_READ, bit, 0, 0, 0) == 1:
                libc.prctl(_PR_CAPBSET_DROP, bit, 0, 0, 0)
    mask = sum(1 << bit for bit in capabilities)
    passed_on = mask & _inheritable() & 1 << Capability.CAP_NET_BIND_SERVICE
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    words = [bits >> shift & 0xFFFFFFFF for shift in (0, 32) for bits in (mask, mask, passed_on)]
    if libc.capset(header, (ctypes.c_uint32 * 6)(*words)):
        raise CannotTrace(
            f"cannot give up privileges: {os.strerror(ctypes.get_errno())}; run it as root, or as the systemd unit does"
        )


def port(address: str) -> int:
    """The port of ADDR:PORT; 0 where there is none."""
    number = address.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def _inheritable() -> int:
    return effective_capabilities(name="CapInh")


def _is_writable(path: Path) -> bool:
    """Whether the path is writable without a capability; for a path that does not exist, the parent counts."""
    try:
        status = path.stat()
    except OSError:
        return True
    if status.st_uid == os.geteuid():
        return True
    shift = 3 if status.st_gid in {os.getegid(), *os.getgroups()} else 0
    return bool(status.st_mode >> shift & os.W_OK)
