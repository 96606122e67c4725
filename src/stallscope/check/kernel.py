"""The kernel and the permissions: does the real program load?"""

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

from stallscope.capture import requirements
from stallscope.capture.program import Options, Program
from stallscope.check.finding import Finding, failed, passed, warned
from stallscope.errors import CannotTrace

_HOOKS = {
    "session": "uprobe sessions (6.13 and later): the cheapest hooks",
    "multi": "uprobe multi links (6.6 and later)",
    "perf": "single uprobes through perf events",
}
_OLDEST_GOOD = (6, 6)
_SCOPE_NOBODY = 3


def findings(
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
    *,
    load: Callable[[], str] | None = None,
) -> Iterator[Finding]:
    """The kernel, its type information, what this user may do, and whether the programs load.

    load: loads the programs, takes them out again and gives the way of hooking; raises CannotTrace.
    """
    yield _release(platform.release(), platform.machine())
    has_btf = (sys / "kernel/btf/vmlinux").exists()
    yield _btf(has_btf)
    capabilities = _capabilities(proc)
    yield capabilities
    yield from _confinement(proc, sys)
    if has_btf and capabilities.state != "fail":
        yield _programs(load or _loaded)


def _release(release: str, machine: str) -> Finding:
    said = f"Linux {release} on {machine}"
    if machine not in ("x86_64", "aarch64"):
        return failed("kernel", said, "trace on x86-64 or arm64: the programs exist for these only")
    numbers = [int(part) for part in release.split(".")[:2] if part.isdigit()]
    if tuple(numbers) < _OLDEST_GOOD:
        return warned("kernel", said, "hooks cost several times as much before Linux 6.6: upgrade if you can")
    return passed("kernel", said)


def _btf(is_there: bool) -> Finding:
    if is_there:
        return passed("BTF", "/sys/kernel/btf/vmlinux")
    return failed(
        "BTF", "none", "use a kernel built with CONFIG_DEBUG_INFO_BTF, as all large distributions' are"
    )


def _capabilities(proc: Path) -> Finding:
    missing = requirements.missing_capabilities(requirements.effective(proc))
    if not missing:
        names = ", ".join(each.name for each in requirements.PURPOSES)
        return passed("capabilities", f"all that tracing needs: {names}")
    said, remedy = f"missing: {requirements.told(missing)}", requirements.remedy(proc, "stallscope check")
    if requirements.necessary(missing):
        return failed("capabilities", said, remedy)
    return warned("capabilities", said, f"some libraries will not be seen: {remedy}")


def _confinement(proc: Path, sys: Path) -> Iterator[Finding]:
    """What else can stand in the way: said only where it does."""
    if requirements.has_own_pids(proc):
        yield failed(
            "container",
            "process numbers of its own, and the kernel tells the machine's",
            "start it with --pid=host (Kubernetes: hostPID: true)",
        )
    lockdown = _text(sys / "kernel/security/lockdown")
    if "[confidentiality]" in lockdown:
        yield failed(
            "lockdown", "confidentiality: BPF may not read memory", "boot with lockdown=integrity, or without"
        )
    if _text(proc / "sys/kernel/yama/ptrace_scope") == str(_SCOPE_NOBODY):
        yield warned(
            "ptrace",
            "kernel.yama.ptrace_scope is 3: not even root may look into processes",
            "boot with ptrace_scope 2 or less, to find libraries that were deleted or replaced",
        )


def _programs(load: Callable[[], str]) -> Finding:
    try:
        mode = load()
    except CannotTrace as error:
        return failed("BPF programs", str(error), "send this line with `stallscope check --bundle` to us")
    if mode == "perf":
        return warned("BPF programs", f"load; {_HOOKS[mode]}", "hooks are cheaper from Linux 6.6 on")
    return passed("BPF programs", f"load; {_HOOKS.get(mode, mode)}")


def _loaded() -> str:
    with Program.load(Options(own_pid=os.getpid())) as program:
        return program.mode


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
