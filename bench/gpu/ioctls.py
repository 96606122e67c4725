"""On GPUs: which ioctls of the real driver does `trace --gpu-ioctls` record, and is a known number right?

    python bench/gpu/ioctls.py [--folder DIR]

A separate process makes CUDA calls through the driver's library, and a known number of ioctls that the driver does not
have. nvidia-smi, which makes no CUDA call, runs at the same time. Prints and stores the records of both.
"""

import argparse
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from report import report
from running import end, start, tracing

N_UNKNOWN = 1000
KNOWN = {"ioctl:NV_ESC_RM_CONTROL", "ioctl:NV_ESC_RM_ALLOC", "ioctl:NV_ESC_RM_FREE", "ioctl:UVM_INITIALIZE"}
"""Without these no CUDA context is made."""

UNKNOWN = "ioctl:nvidia:0x5f"
AFTER_S = 3

_CALLER = f"""
import ctypes, fcntl, os
cuda = ctypes.CDLL("libcuda.so.1")
context, address = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
for _ in range(50):
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64 << 20)) == 0
    assert cuda.cuMemFree_v2(address) == 0
control = os.open("/dev/nvidiactl", os.O_RDWR)
for _ in range({N_UNKNOWN}):
    try: fcntl.ioctl(control, 0xC008465F, bytes(8))
    except OSError: pass
cuda.cuDevicePrimaryCtxRelease(0)
"""


def main() -> None:
    """Trace both, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report("gpu_ioctls_on_gpus", traced(folder))


def traced(folder: Path) -> dict[str, Any]:
    """The records of the caller and of nvidia-smi."""
    db, smi = folder / "trace.db", shutil.which("nvidia-smi")
    with tracing(db, words=("--gpu-ioctls", "--node", "here"), awaits="processes,"):
        caller = start([sys.executable, "-c", _CALLER], folder / "caller.log")
        code = caller.process.wait(60)
        if smi:
            subprocess.run([smi, "-q"], stdout=subprocess.DEVNULL, timeout=60)
        time.sleep(AFTER_S)
        end(caller)
    result = _told(db, caller.process.pid)
    return {
        "caller_exit_code": code,
        "is_right": result["of_caller"].keys() >= KNOWN
        and result["of_caller"].get(UNKNOWN, {}).get("n") == N_UNKNOWN,
        "has_nvidia_smi": bool(smi),
        "devices": [line for line in Path("/proc/devices").read_text().splitlines() if "nvidia" in line],
    } | result


def _told(db: Path, pid: int) -> dict[str, Any]:
    with closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as reader:
        rows = reader.execute(
            "SELECT o.pid = ?, s.name, SUM(o.n), SUM(o.n_failed), SUM(o.total_ns) / 1e6, MAX(o.max_ns) / 1e6 "
            "FROM operations o JOIN symbols s ON s.symbol = o.symbol WHERE s.name LIKE 'ioctl:%' "
            "GROUP BY 1, 2 ORDER BY 5 DESC",
            (pid,),
        ).fetchall()
        names = ("n", "n_failed", "total_ms", "max_ms")
        of_caller, of_others = (
            {name: dict(zip(names, numbers, strict=True)) for is_own, name, *numbers in rows if is_own == own}
            for own in (1, 0)
        )
        return {
            "facts": reader.execute("SELECT facts FROM sessions").fetchone()[0],
            "of_caller": of_caller,
            "of_others": of_others,
            "slow": reader.execute(
                "SELECT comm, device, detail, duration_ns / 1e6, value FROM host_events WHERE kind = 15 "
                "ORDER BY duration_ns DESC LIMIT 10"
            ).fetchall(),
            "programs": reader.execute(
                "SELECT DISTINCT value FROM annotations WHERE label='program'"
            ).fetchall(),
        }


if __name__ == "__main__":
    main()
