"""The NVIDIA driver, and the GPUs as the driver's management library (NVML) tells them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stallscope.check.finding import Finding, passed, warned


def findings(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """The driver and each GPU. Without a driver there are no GPUs to trace, but emulated ones still can be."""
    version = driver_version(proc)
    if not version:
        yield warned("driver", "no NVIDIA driver", "install it, or look here for emulated jobs only")
        return
    yield passed("driver", f"NVIDIA {version}")
    yield from _gpus()


def driver_version(proc: Path) -> str:
    """The version of the loaded kernel module; empty without one."""
    try:
        found = re.search(r"Module(?: for \S+)?\s+(\d[\d.]+)", (proc / "driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _gpus() -> Iterator[Finding]:
    try:
        import pynvml
    except ImportError:
        yield warned("GPUs", "NVML is not asked: nvidia-ml-py is missing", "pip install 'stallscope[gpu]'")
        return
    try:
        with _nvml(pynvml):
            for number in range(pynvml.nvmlDeviceGetCount()):
                yield _gpu(pynvml, number)
    except pynvml.NVMLError as error:
        yield warned(
            "GPUs", f"NVML: {error}", "run `nvidia-smi`; restart or reinstall the driver if it fails too"
        )


def _gpu(pynvml: Any, number: int) -> Finding:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    name = pynvml.nvmlDeviceGetName(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    subject = f"GPU {number}"
    return passed(subject, f"{name}, {memory.used / 2**30:.1f} of {memory.total / 2**30:.0f} GiB in use")


@contextmanager
def _nvml(pynvml: Any) -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()
