"""Share of right Python stacks among many stacks that the kernel walks while other threads run.

The program announces the code location of each call; a stack is right if all its frames match. Runs for each Python of
this machine. Needs root, gcc, and the built BPF programs. Usage: bench_walks.py [CALLS of each]
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import FOLDER, report

sys.path.insert(0, str(FOLDER.parent))

from tests.capture.stacks.calls_walked import walked
from tests.capture.stacks.interpreters import INTERPRETERS

from stallscope.capture.probes import elf, operations
from stallscope.capture.probes.program import Options, Program

N_CALLS = 25_000
LIBRARY_SOURCE = FOLDER.parent / "tests/capture/targets/calls.c"


def main(n_calls: int = N_CALLS) -> None:
    """Walk and report."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libnccl.so"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, LIBRARY_SOURCE], check=True)
        result = {f"3.{minor}": judged(python, library, n_calls) for minor, python in INTERPRETERS.items()}
    report(
        "walks",
        {
            "n_walks": n_calls * len(result),
            "n_wrong": sum(entry["n_wrong"] for entry in result.values()),
            "pythons": result,
            "load_average": round(os.getloadavg()[0], 2),
        },
    )


def judged(python: str, library: Path, n_calls: int) -> dict[str, int]:
    """Stacks that were right, wrong, and not there."""
    with elf.open_image(library) as image:
        indexes = {
            name: entry.offset for name, entry in elf.exported_functions(image, operations.names()).items()
        }
    with Program.load(Options(slow_call_ns=0)) as program:
        program.attach(str(library), operations.hooks(indexes))
        output = walked(program, python, library, n_calls)
    return {f"n_{name}": output[name] for name in ("right", "wrong", "none")}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
