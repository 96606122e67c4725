"""Facts about the traced machine that a trace must contain."""

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path


def facts(mode: str, proc: Path = Path("/proc"), *, unsupported: Sequence[str] = ()) -> dict[str, str]:
    """Free text by name. mode: the attach method. boot_id: monotonic clocks of two boots are not comparable.

    unsupported: events that the kernel cannot report.
    """
    texts = {"gpu": model} if (model := gpu_model(proc)) else {}
    if unsupported:
        texts["not_told"] = ", ".join(unsupported)
    return texts | {
        "boot_id": boot_id(proc),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "n_cpus": str(os.cpu_count() or 0),
        "hooks": mode,
    }


def gpu_model(proc: Path = Path("/proc")) -> str:
    """The model of the first NVIDIA GPU as its driver names it; empty without a GPU."""
    for path in sorted((proc / "driver/nvidia/gpus").glob("*/information")):
        try:
            model = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if model:
            return model[1]
    return ""


def boot_id(proc: Path = Path("/proc")) -> str:
    """The kernel's id of this boot; empty where it is not available."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
