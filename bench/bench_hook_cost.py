"""Cost of a probed call for its thread, and cost of the scheduler programs per switch.

Calls a function in a loop, alternating with and without probes. The result is the difference of the best batches,
because other work on the machine can only add time.
Needs root, gcc, and the built BPF programs.
"""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from report import FOLDER, report

from stallscope.capture.probes import elf, operations
from stallscope.capture.probes.program import MODES, Program
from stallscope.capture.probes.program import Options as ProgramOptions

LIBRARY_SOURCE = FOLDER.parent / "tests/capture/targets/calls.c"
CALLS = {"cudaSetDevice": "entry_only", "cudaFree": "entry_and_return", "ncclAllReduce": "collective"}
N_TURNS = 7


def main() -> None:
    """Measure and report."""
    modes = sys.argv[1:] or ["session"]
    with tempfile.TemporaryDirectory() as folder:
        loop, library = built(Path(folder))
        costs = {mode: added_ns(loop, library, mode) for mode in modes if mode in MODES}
        report("hook_cost", {"added_ns_per_call": costs, "ns_per_run": program_ns(loop, library)})


def built(folder: Path) -> tuple[Path, Path]:
    """The loop and the library that it calls."""
    library, loop = folder / "libnccl.so", folder / "hook_loop"
    # The real libraries' functions begin with a push, which a probe need not single-step: so must these.
    subprocess.run(
        [
            "gcc",
            "-O0",
            "-fno-omit-frame-pointer",
            "-fcf-protection=none",
            "-shared",
            "-fPIC",
            "-o",
            library,
            LIBRARY_SOURCE,
        ],
        check=True,
    )
    link = [f"-L{folder}", "-lnccl", f"-Wl,-rpath,{folder}"]
    subprocess.run(["gcc", "-O2", "-o", loop, FOLDER / "targets/hook_loop.c", *link], check=True)
    return loop, library


def hooks(library: Path) -> list[operations.Hook]:
    """The hooks of the library."""
    with elf.open_image(library) as image:
        exported = elf.exported_functions(image, operations.names())
    return operations.hooks({name: symbol.offset for name, symbol in exported.items()})


def added_ns(loop: Path, library: Path, mode: str) -> dict[str, float]:
    """ns that hooks add to a call, by kind of call."""
    added = {}
    with Program.load(ProgramOptions(modes=(mode,))) as program:
        for name, kind in CALLS.items():
            with subprocess.Popen([loop, name], stdin=-1, stdout=-1, text=True) as process, drained(program):
                turns = [turn(program, library, process) for _ in range(N_TURNS)]
                assert process.stdin is not None
                process.stdin.close()
            added[kind] = round(min(on for _, on in turns) - min(off for off, _ in turns), 1)
    return added


def turn(program: Program, library: Path, process: "subprocess.Popen[str]") -> tuple[float, float]:
    """ns per call without hooks, and with."""
    without = measured(process)
    link = program.attach(str(library), hooks(library))
    with_hooks = measured(process)
    link.close()
    return without, with_hooks


def measured(process: "subprocess.Popen[str]") -> float:
    """One measurement by the loop."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


class drained:  # noqa: N801 (read as a statement)
    """Drains the rings at the same time, so that emitting has its real cost."""

    def __init__(self, program: Program):
        self._program, self._stop = program, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self._program.arrivals.drain()
            self._program.events.drain()


def program_ns(loop: Path, library: Path) -> dict[str, float]:
    """Mean ns of a run of each program by the kernel's own statistics, which themselves take about 80."""
    with Program.load() as program:
        program.attach(str(library), hooks(library))
        program.measure()
        with (
            subprocess.Popen([loop, "ncclAllReduce"], stdin=-1, stdout=-1, text=True) as process,
            drained(program),
        ):
            measured(process)
            assert process.stdin is not None
            process.stdin.close()
        return {
            name: round(cost.run_ns / cost.n_runs, 1) for name, cost in program.costs().items() if cost.n_runs
        }


if __name__ == "__main__":
    main()
