"""Requirements of the machine and the user for tracing, checked before the first attempt.

A kernel's features are found by trying (see program.py). The checks here are for failures that would otherwise end in
an error number without a meaning for the user.
"""

import gzip
import os
import re
import zlib
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from stallscope.errors import CannotTrace, NotFound


class Capability(IntEnum):
    """The relevant capabilities, with their bits (linux/capability.h)."""

    CAP_CHOWN = 0
    CAP_DAC_OVERRIDE = 1
    CAP_DAC_READ_SEARCH = 2
    CAP_SETPCAP = 8
    CAP_NET_BIND_SERVICE = 10
    CAP_SYS_PTRACE = 19
    CAP_SYS_ADMIN = 21
    CAP_PERFMON = 38
    CAP_BPF = 39
    CAP_CHECKPOINT_RESTORE = 40


PURPOSES = {
    Capability.CAP_BPF: "load programs",
    Capability.CAP_PERFMON: "attach them",
    Capability.CAP_SYS_PTRACE: "see what other users' processes have mapped",
    Capability.CAP_DAC_READ_SEARCH: "read libraries in other users' folders",
    Capability.CAP_CHECKPOINT_RESTORE: "open libraries that were deleted or replaced",
}
"""The capabilities that tracing needs, with their purposes. The first three are required; without the other two some
libraries are not traced.
"""

_REQUIRED = (Capability.CAP_BPF, Capability.CAP_PERFMON, Capability.CAP_SYS_PTRACE)
_INCLUDES = {
    Capability.CAP_SYS_ADMIN: {
        Capability.CAP_BPF,
        Capability.CAP_PERFMON,
        Capability.CAP_CHECKPOINT_RESTORE,
    },
    Capability.CAP_DAC_OVERRIDE: {Capability.CAP_DAC_READ_SEARCH},
}

_ARCHITECTURES = ("x86_64", "aarch64")
_MIN_LINUX = (5, 15)
"""The first Linux with all features that have no fallback: bpf_get_attach_cookie()."""

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO in linux/proc_ns.h, since 3.8."""


def check(proc: Path = Path("/proc"), sys: Path = Path("/sys"), machine: str = os.uname().machine) -> None:
    """Raises CannotTrace with the first missing requirement and its remedy."""
    if machine not in _ARCHITECTURES:
        raise CannotTrace(f"cannot trace on {machine}: only {' and '.join(_ARCHITECTURES)} are supported")
    missing = required(missing_capabilities(effective_capabilities(proc)))
    if missing:
        raise CannotTrace(f"not allowed to trace: {describe(missing)} missing; {remedy(proc)}")
    if has_own_pids(proc):
        raise CannotTrace(
            "cannot trace from a container with its own pid namespace: the kernel reports the machine's numbers; "
            "start it with --pid=host (Kubernetes: hostPID: true)"
        )
    if not (sys / "kernel/btf/vmlinux").exists():
        cause = why_no_btf(sys, proc)
        remedy_text = cause.remedy or "use a kernel with CONFIG_DEBUG_INFO_BTF, as in all large distributions"
        raise CannotTrace(
            f"cannot trace without BTF (/sys/kernel/btf/vmlinux): {cause.reason}; {remedy_text}"
        )


class NoBtf(NamedTuple):
    """The reason why the kernel's type information is not visible. remedy: empty if only another kernel helps."""

    reason: str
    remedy: str = ""


def why_no_btf(sys: Path = Path("/sys"), proc: Path = Path("/proc"), boot: Path = Path("/boot")) -> NoBtf:
    """Distinguishes a kernel without BTF from a chroot or container that hides it."""
    if not (sys / "kernel").is_dir():
        return NoBtf(
            f"{sys} is not mounted here", "mount it (docker run -v /sys:/sys:ro): mount -t sysfs sysfs /sys"
        )
    if _is_built_with_btf(proc, boot):
        return NoBtf(
            f"this container hides {sys}/kernel/btf",
            "share the folder: docker run -v /sys/kernel/btf:/sys/kernel/btf:ro",
        )
    return NoBtf("this kernel was built without it")


def _is_built_with_btf(proc: Path, boot: Path) -> bool:
    """Whether the kernel's own configuration lists BTF; False if it cannot be read."""
    for path in (proc / "config.gz", boot / f"config-{os.uname().release}"):
        try:
            data = path.read_bytes()
            text = gzip.decompress(data) if path.suffix == ".gz" else data
        except (OSError, EOFError, zlib.error):
            continue
        return b"\nCONFIG_DEBUG_INFO_BTF=y" in text
    return False


def check_age(release: str) -> None:
    """Raises CannotTrace for a Linux that is too old, by its release (uname -r); for a kernel that refused a try.

    It is not called before the try: old releases of some distributions have the necessary features.
    """
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < _MIN_LINUX:
        raise CannotTrace(
            f"cannot trace on Linux {release}: {'.'.join(map(str, _MIN_LINUX))} or newer is needed"
        )


def check_pids(pids: Iterable[int], proc: Path = Path("/proc")) -> None:
    """Raises NotFound for a process that does not exist."""
    for pid in pids:
        if not (proc / str(pid)).is_dir():
            raise NotFound(
                f"process {pid} does not exist: check the number, or omit --pid to trace all processes"
            )


def missing_capabilities(mask: int) -> list[Capability]:
    """The members of PURPOSES that are missing in a set of capabilities, given as a bit mask."""
    available = {bit for bit in range(64) if mask >> bit & 1}
    for capability, included in _INCLUDES.items():
        if capability in available:
            available |= included
    return [capability for capability in PURPOSES if capability not in available]


def required(capabilities: Iterable[Capability]) -> list[Capability]:
    """The missing capabilities without which nothing can be traced."""
    return [capability for capability in capabilities if capability in _REQUIRED]


def describe(capabilities: Iterable[Capability]) -> str:
    """Their names and purposes, in words."""
    return ", ".join(f"{capability.name} (to {PURPOSES[capability]})" for capability in capabilities)


def effective_capabilities(proc: Path = Path("/proc"), name: str = "CapEff") -> int:
    """The capabilities of this thread, as a bit mask. name: another of its sets (CapInh, CapPrm, CapBnd)."""
    return int(_status(proc, name), 16)


def has_own_pids(proc: Path = Path("/proc")) -> bool:
    """Whether this process is in a container that has its own pid namespace."""
    return _pid_namespace(proc) not in ("", _FIRST_PID_NAMESPACE)


def _pid_namespace(proc: Path) -> str:
    try:
        return str((proc / "self/ns/pid").readlink())
    except OSError:
        return ""


def remedy(proc: Path = Path("/proc"), command: str = "stallscope trace") -> str:
    """The remedy for missing capabilities."""
    if int(_status(proc, "Uid")) == 0:
        return (
            "you are root, but confined; give the container these capabilities: docker run --cap-add BPF "
            "--cap-add PERFMON --cap-add SYS_PTRACE --cap-add DAC_READ_SEARCH --cap-add CHECKPOINT_RESTORE"
        )
    return f"give it these capabilities, as the systemd unit does, or run it as root: sudo {command}"


def _status(proc: Path, name: str) -> str:
    """The first word of a line of /proc/self/status."""
    try:
        lines = (proc / "self" / "status").read_text().splitlines()
    except OSError as error:
        raise CannotTrace(
            f"cannot read {proc}/self/status: {error.strerror}; mount -t proc proc /proc"
        ) from error
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "0")
