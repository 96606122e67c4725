"""The output of every benchmark: its numbers, with the commit and the machine."""

import json
import os
import platform
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def report(name: str, numbers: dict[str, Any]) -> None:
    """Print as JSON, and keep in results/NAME.json. Keys of `numbers` carry their unit."""
    result = {
        "benchmark": name,
        **numbers,
        "commit": commit(),
        "machine": machine(),
        "date": time.strftime("%F"),
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(result, indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)


def machine() -> dict[str, Any]:
    """The processor, its count, the kernel, and whether all is virtual."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "n_cpus": os.cpu_count(),
        "kernel": platform.release(),
        "is_virtual": any("hypervisor" in line for line in info if line.startswith("flags")),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit of the code; a copy without git has it in BENCH_COMMIT."""
    if response := os.environ.get("BENCH_COMMIT"):
        return response
    words = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(FileNotFoundError):
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"
    return "unknown"
