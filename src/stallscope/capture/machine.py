"""What a trace must say about the machine it was made on."""

import os
import platform
from pathlib import Path


def facts(mode: str, proc: Path = Path("/proc")) -> dict[str, str]:
    """Free text by name. mode: how functions are hooked. boot_id: monotonic clocks of two boots are strangers."""
    return {
        "boot_id": boot_id(proc),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "n_cpus": str(os.cpu_count() or 0),
        "hooks": mode,
    }


def boot_id(proc: Path = Path("/proc")) -> str:
    """The kernel's name for this boot; empty where it does not tell."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
