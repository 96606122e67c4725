"""The NVIDIA driver, and the GPUs that the driver's management library (NVML) reports."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stallscope.capture.gpu import GpuStates, nvml
from stallscope.check.distribution import commands
from stallscope.check.finding import Finding, passed, warned
from stallscope.errors import CannotTrace
from stallscope.events.layout import UNKNOWN


def findings(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """The driver and each GPU. A machine without a driver has no GPUs to trace, but emulated GPUs still work."""
    version = driver_version(proc)
    if not version:
        yield warned(
            "driver", "no NVIDIA driver", f"only emulated jobs can be traced; install it: {commands().driver}"
        )
        return
    yield passed("driver", f"NVIDIA {version}")
    yield from _gpus(proc)


def driver_version(proc: Path) -> str:
    """The version of the loaded kernel module; empty without one."""
    try:
        match = re.search(r"Module(?: for \S+)?\s+(\d[\d.]+)", (proc / "driver/nvidia/version").read_text())
    except OSError:
        return ""
    return match[1] if match else ""


def _gpus(proc: Path) -> Iterator[Finding]:
    try:
        with nvml.library() as library:
            rows = GpuStates(library, node=0).read(0).gpus
    except CannotTrace as error:
        models = ", ".join(f"{name} (x{n})" for name, n in sorted(_models(proc).items()))
        yield warned("GPUs", f"{models or 'model unknown'}; memory and errors are not read", str(error))
        return
    for row in rows[rows["mig"] == UNKNOWN]:
        yield _gpu(row)


def _models(proc: Path) -> Counter[str]:
    """The models by the driver's own list, which needs no library."""
    models: Counter[str] = Counter()
    for path in (proc / "driver/nvidia/gpus").glob("*/information"):
        if match := re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE):
            models[match[1].strip()] += 1
    return models


def _gpu(row: Any) -> Finding:
    subject, name = f"GPU {row['gpu']}", row["name"].decode() or "unknown model"
    if row["sm_mhz"] == row["memory_total_bytes"] == UNKNOWN:
        return warned(
            subject, f"{name} reports no state", "check for Xid errors (dmesg), and test or reset it"
        )
    if row["memory_total_bytes"] == UNKNOWN:
        return passed(subject, name)
    used, total = row["memory_used_bytes"] / 2**30, row["memory_total_bytes"] / 2**30
    return passed(subject, f"{name}, {used:.1f} of {total:.0f} GiB in use")
