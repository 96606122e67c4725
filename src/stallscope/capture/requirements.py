"""What this machine and this user must bring before anything can be traced, asked before the first attempt.

A kernel's abilities are found by trying (see program.py); here is only what a try would answer with an error
number that says nothing to a user.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from stallscope.errors import CannotTrace, NotFound


class _Capability(NamedTuple):
    """A capability: its bit (linux/capability.h), its name, what tracing needs it for."""

    bit: int
    name: str
    purpose: str


_NEEDED = (
    _Capability(39, "CAP_BPF", "load programs"),
    _Capability(38, "CAP_PERFMON", "attach them"),
    _Capability(19, "CAP_SYS_PTRACE", "see what other users' processes have mapped"),
)
_SYS_ADMIN = 21
_STANDS_FOR = {38, 39}
"""What CAP_SYS_ADMIN includes."""

_ARCHITECTURES = ("x86_64", "aarch64")
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO in linux/proc_ns.h, since 3.8."""


def check(proc: Path = Path("/proc"), sys: Path = Path("/sys"), machine: str = os.uname().machine) -> None:
    """Raises CannotTrace, naming the first thing that is missing and what to do."""
    if machine not in _ARCHITECTURES:
        raise CannotTrace(f"cannot trace on {machine}: only {' and '.join(_ARCHITECTURES)} are supported")
    missing = missing_capabilities(effective(proc))
    if missing:
        wanted = ", ".join(f"{capability.name} (to {capability.purpose})" for capability in missing)
        raise CannotTrace(f"not allowed to trace: {wanted} missing; {remedy(proc)}")
    if has_own_pids(proc):
        raise CannotTrace(
            "cannot trace from a container with process numbers of its own: the kernel tells the machine's; "
            "start it with --pid=host (Kubernetes: hostPID: true)"
        )
    if not (sys / "kernel/btf/vmlinux").exists():
        raise CannotTrace(
            "cannot trace on this kernel: it has no BTF (/sys/kernel/btf/vmlinux); "
            "use one built with CONFIG_DEBUG_INFO_BTF, as all large distributions' are since 2021"
        )


def check_pids(pids: Iterable[int], proc: Path = Path("/proc")) -> None:
    """Raises NotFound for a process that does not exist."""
    for pid in pids:
        if not (proc / str(pid)).is_dir():
            raise NotFound(f"there is no process {pid}: check the number, or leave --pid out to trace all")


def missing_capabilities(effective: int) -> list[_Capability]:
    """What is missing in a set of capabilities, given as a bit mask."""
    held = {bit for bit in range(64) if effective >> bit & 1}
    if _SYS_ADMIN in held:
        held |= _STANDS_FOR
    return [capability for capability in _NEEDED if capability.bit not in held]


def effective(proc: Path = Path("/proc")) -> int:
    """The capabilities of this process, as a bit mask."""
    return int(_status(proc, "CapEff"), 16)


def has_own_pids(proc: Path = Path("/proc")) -> bool:
    """Whether this process is in a container whose process numbers are not the machine's."""
    return _pid_namespace(proc) not in ("", _FIRST_PID_NAMESPACE)


def _pid_namespace(proc: Path) -> str:
    try:
        return str((proc / "self/ns/pid").readlink())
    except OSError:
        return ""


def remedy(proc: Path = Path("/proc"), command: str = "stallscope trace") -> str:
    """What to do about missing capabilities."""
    if int(_status(proc, "Uid")) == 0:
        return "you are root, but confined: give the container --privileged, or these capabilities"
    return f"run it as root: sudo {command}"


def _status(proc: Path, name: str) -> str:
    """The first word of a line of /proc/self/status."""
    lines = (proc / "self" / "status").read_text().splitlines()
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "0")
