"""Checks the kernel and the permissions, and whether the BPF programs load."""

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.gpu import majors
from stallscope.capture.probes import IOCTL_WAYS, Options, Program, preflight
from stallscope.capture.stacks import read_restriction
from stallscope.check.distribution import commands
from stallscope.check.finding import Finding, failed, passed, warned
from stallscope.errors import CannotTrace

_HOOKS = {
    "session": "uprobe sessions (6.13 and later): the cheapest probes",
    "multi": "uprobe multi links (6.6 and later)",
    "perf": "single uprobes through perf events",
}
_IOCTLS = {
    "function": "by a probe on ioctl alone",
    "tracepoint": "by the tracepoints of all system calls, which slows every system call slightly",
}
_OLDEST_GOOD = (6, 6)


class Loaded(NamedTuple):
    """mode: the kind of probes. peeks: whether BPF can read threads and memory.

    ioctl_way: the method of counting calls into the GPU driver; empty if unavailable.
    """

    mode: str
    peeks: bool = True
    ioctl_way: str = "function"
    is_x86: bool = platform.machine() == "x86_64"


def findings(
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
    *,
    load: Callable[[], Loaded] | None = None,
) -> Iterator[Finding]:
    """The kernel, its type information, this user's permissions, and whether the programs load.

    load: loads the programs, unloads them and returns their abilities; raises CannotTrace.
    """
    yield _release(platform.release(), platform.machine())
    has_btf = (sys / "kernel/btf/vmlinux").exists()
    yield _btf(has_btf, preflight.why_no_btf(sys, proc))
    if not (proc / "self/status").exists():
        yield failed("/proc", "not mounted", "mount it: mount -t proc proc /proc")
        return
    capabilities = _capabilities(proc)
    yield capabilities
    yield from _confinement(proc, sys)
    if has_btf and capabilities.state != "fail":
        why_no_memory = read_restriction(proc / "sys/kernel/yama/ptrace_scope")
        yield from _programs(load or _loaded, why_no_memory, bool(majors(proc)))


def _release(release: str, machine: str) -> Finding:
    system = f"Linux {release} on {machine}"
    if machine not in ("x86_64", "aarch64"):
        return failed("kernel", system, "trace on x86-64 or arm64: stallscope has programs only for these")
    numbers = [int(part) for part in release.split(".")[:2] if part.isdigit()]
    if tuple(numbers) < _OLDEST_GOOD:
        return warned(
            "kernel", system, "probes cost several times as much before Linux 6.6: upgrade if you can"
        )
    return passed("kernel", system)


def _btf(is_there: bool, why_not: preflight.NoBtf) -> Finding:
    if is_there:
        return passed("BTF", "/sys/kernel/btf/vmlinux")
    if why_not.remedy:
        return failed("BTF", f"not visible: {why_not.reason}", why_not.remedy)
    return failed("BTF", why_not.reason, f"install the distribution's kernel: {commands().kernel}")


def _capabilities(proc: Path) -> Finding:
    missing = preflight.missing_capabilities(preflight.effective_capabilities(proc))
    if not missing:
        names = ", ".join(each.name for each in preflight.PURPOSES)
        return passed("capabilities", f"all that tracing needs: {names}")
    lack, remedy = f"missing: {preflight.describe(missing)}", preflight.remedy(proc, "stallscope check")
    if preflight.required(missing):
        return failed("capabilities", lack, remedy)
    return warned("capabilities", lack, f"some libraries will not be traced: {remedy}")


def _confinement(proc: Path, sys: Path) -> Iterator[Finding]:
    """Container and lockdown limits; no line without a problem."""
    if preflight.has_own_pids(proc):
        yield failed(
            "container",
            "own process numbers, while the kernel reports the machine's",
            "share the machine's process numbers (Kubernetes: hostPID: true): docker run --pid=host",
        )
    lockdown = _text(sys / "kernel/security/lockdown")
    if "[confidentiality]" in lockdown:
        yield failed("lockdown", "confidentiality: BPF may not read memory", commands().lockdown)


def _programs(load: Callable[[], Loaded], why_no_memory: str, has_driver: bool) -> Iterator[Finding]:
    try:
        loaded = load()
    except CannotTrace as error:
        yield failed(
            "BPF programs",
            str(error),
            "report it with a support bundle: stallscope check --bundle bundle.tar.gz",
        )
        return
    kind = f"load; {_HOOKS.get(loaded.mode, loaded.mode)}"
    if loaded.mode == "perf":
        yield warned("BPF programs", kind, "probes are cheaper from Linux 6.6 on")
    else:
        yield passed("BPF programs", kind)
    yield _stacks(loaded, why_no_memory)
    yield _driver_calls(loaded.ioctl_way, has_driver)


def _stacks(loaded: Loaded, why_no_memory: str) -> Finding:
    """Whether call stacks of threads can be read. why_no_memory: the reason why a system call cannot read memory."""
    if not loaded.is_x86:
        return warned("stacks", "none on this architecture", "examine hung processes with py-spy or gdb")
    if loaded.peeks:
        return passed(
            "stacks", f"Python and native, by BPF: {why_no_memory}" if why_no_memory else "Python and native"
        )
    if why_no_memory:
        return warned("stacks", f"none: {why_no_memory}", "use Linux 5.18 or newer, where BPF reads it")
    return warned("stacks", "Python only", "native frames need Linux 5.18 or newer")


def _driver_calls(way: str, has_driver: bool) -> Finding:
    """Whether `trace --gpu-ioctls` can count; the option is off by default, so its absence is not a warning."""
    if not way:
        return passed("driver calls", "cannot be counted on this kernel: --gpu-ioctls has no effect")
    method = f"can be counted (--gpu-ioctls): {_IOCTLS.get(way, way)}"
    return passed("driver calls", method if has_driver else f"{method}; no NVIDIA driver in /proc/devices")


def _loaded() -> Loaded:
    with Program.load(Options(own_pid=os.getpid(), ioctl_ways=tuple(IOCTL_WAYS))) as program:
        return Loaded(program.mode, program.peeks, program.ioctl_way)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
