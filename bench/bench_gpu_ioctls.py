"""What `trace --gpu-ioctls` costs: an ioctl of the driver, an ioctl of another file, and any other system call.

Three loops (/dev/null stands for a device of the driver, a file of /proc for another, getpid for other system calls),
in turns with the kernel side without the option and with it, in each way that this kernel has. The best batches
count, since other programs on the machine can only add time. Needs root, gcc, and the built BPF programs.
"""

import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from report import FOLDER, report

from stallscope.capture.gpu.drivers import Driver
from stallscope.capture.probes.optional_programs import IOCTL_WAYS
from stallscope.capture.probes.program import Options, Program

LOOPS = {"driver_ioctl": "/dev/null", "other_ioctl": "/proc/version", "getpid": "getpid"}
MEMORY_MAJOR = 1
N_TURNS = 3


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "syscall_loop"
        subprocess.run(["gcc", "-O2", "-o", path, FOLDER / "targets/syscall_loop.c"], check=True)
        loops = {
            name: stack.enter_context(subprocess.Popen([path, what], stdin=-1, stdout=-1, text=True))
            for name, what in LOOPS.items()
        }
        turns = [(way, measured(loops, ways)) for _ in range(N_TURNS) for way, ways in _ways()]
        for loop in loops.values():
            loop.communicate()
    best = {
        way: {name: min(output[name] for of, output in turns if of == way and output) for name in LOOPS}
        for way, output in turns
        if output
    }
    added = {
        way: {name: round(costs[name] - best["without"][name], 1) for name in LOOPS}
        for way, costs in best.items()
        if way != "without"
    }
    report("gpu_ioctls", {"ns_per_call": best, "added_ns_per_call": added})


def _ways() -> list[tuple[str, tuple[str, ...]]]:
    return [("without", ()), *((way, (way,)) for way in IOCTL_WAYS)]


def measured(loops: "dict[str, subprocess.Popen[str]]", ways: tuple[str, ...]) -> dict[str, float]:
    """ns per call by loop; empty where this kernel cannot."""
    with Program.load(Options(ioctl_ways=ways)) as program:
        if ways and not program.ioctl_way:
            return {}
        program.know_drivers({MEMORY_MAJOR: Driver.NVIDIA})
        return {name: told(loop) for name, loop in loops.items()}


def told(loop: "subprocess.Popen[str]") -> float:
    """One measurement by a loop."""
    assert loop.stdin is not None and loop.stdout is not None
    loop.stdin.write("\n")
    loop.stdin.flush()
    return float(loop.stdout.readline())


if __name__ == "__main__":
    main()
