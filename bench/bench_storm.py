"""A storm of launches, 400,000 calls a second and more: sent records = received records + counted losses.

Two modes: counting probes (the mode of launches while their probes are on), and a record for each call, which exceeds
the capacity of any ring. Some processes launch at full speed. Needs root, gcc, and the built BPF programs.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import FOLDER, report

from stallscope.capture.probes import elf, operations
from stallscope.capture.probes.collector import Collector
from stallscope.capture.probes.operations import SYMBOLS
from stallscope.capture.probes.program import Options, Program
from stallscope.capture.probes.ring import Ring
from stallscope.capture.rows import records
from stallscope.events.kernel import HookGroup, Kind
from stallscope.events.layout import Array

LIBRARY_SOURCE = FOLDER.parent / "tests/capture/targets/cuda.c"
LAUNCH = "cudaLaunchKernel"
LAUNCHER = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
print(flush=True)
library.storm(int(sys.stdin.readline()))
"""
N_PROCESSES = 2
N_CALLS = 1_000_000
TAKE_EVERY_S = 0.2


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as folder:
        library = built(Path(folder))
        result = {"counted": counted(library, N_CALLS), "told": told(library, N_CALLS)}
        report("storm", result | {"load_average": round(os.getloadavg()[0], 2)})


def built(folder: Path) -> Path:
    """The library whose launches do nothing. Like the real one its functions begin with a push."""
    library = folder / "libcudart.so.12"
    flags = ["-O1", "-Wno-unused-parameter", "-fno-omit-frame-pointer", "-fcf-protection=none"]
    subprocess.run(["gcc", *flags, "-shared", "-fPIC", "-o", library, LIBRARY_SOURCE], check=True)
    return library


def counted(library: Path, n_calls: int) -> dict[str, Any]:
    """All calls against the sums in the kernel. n_calls: of each process."""
    with hooked(library, Options()) as program:
        elapsed_s = storm(library, n_calls, lambda: None)
        keys, values = program.operations()
        n = int(values["n"][keys["symbol"] == SYMBOLS.index(LAUNCH)].sum())
        return accounted(n_calls, n, {"no_room": program.losses()["lost_operation"]}, elapsed_s)


def told(library: Path, n_calls: int, *, ring_bytes: int = 4 << 20, max_waiting_bytes: int = 64 << 20) -> Any:
    """All calls against the records that came, and those that were lost on the way. n_calls: of each process."""
    with hooked(library, Options(slow_call_ns=0, ring_bytes=ring_bytes)) as program:
        collector = Collector(Launches(program.events), max_waiting_bytes=max_waiting_bytes)
        received: list[int] = []

        def take() -> None:
            received.append(len(collector.take()[0]))

        collector.start()
        elapsed_s = storm(library, n_calls, take)
        collector.stop()
        take()
        losses = {"ring_full": program.losses()["lost_call"], "waited_too_long": collector.n_dropped}
        return accounted(n_calls, sum(received), losses, elapsed_s)


class Launches:
    """A ring of events, of which only launches are looked at."""

    def __init__(self, ring: Ring):
        self.fd, self.fill, self._ring = ring.fd, ring.fill, ring

    def drain(self) -> Array:
        """Those since the last call."""
        calls = records.of_kind(self._ring.drain(), Kind.CALL)
        return calls[calls["symbol"] == SYMBOLS.index(LAUNCH)]


def accounted(n_calls: int, n_received: int, losses: dict[str, int], elapsed_s: float) -> dict[str, Any]:
    """The account of a storm."""
    n_sent = n_calls * N_PROCESSES
    return {
        "calls_per_s": round(n_sent / elapsed_s),
        "n_sent": n_sent,
        "n_received": n_received,
        "n_lost": losses,
        "n_unaccounted": n_sent - n_received - sum(losses.values()),
    }


@contextmanager
def hooked(library: Path, options: Options) -> Iterator[Program]:
    """The kernel side, with hooks on launches by the runtime."""
    with elf.open_image(library) as image:
        offset = elf.exported_functions(image, [LAUNCH])[LAUNCH].offset
    with Program.load(options) as program:
        program.attach(str(library), operations.hooks({LAUNCH: offset}, groups=(HookGroup.HOT,)))
        yield program


def storm(library: Path, n_calls: int, meanwhile: Any) -> float:
    """Seconds that some processes took to launch n_calls times each; calls meanwhile() at intervals in that time."""
    command = [sys.executable, "-c", LAUNCHER, str(library)]
    processes = [subprocess.Popen(command, stdin=-1, stdout=-1) for _ in range(N_PROCESSES)]
    for process in processes:
        process.stdout.readline()
    begin_s = time.monotonic()
    for process in processes:
        process.stdin.write(b"%d\n" % n_calls)
        process.stdin.flush()
    while any(process.poll() is None for process in processes):
        meanwhile()
        time.sleep(TAKE_EVERY_S)
    elapsed_s = time.monotonic() - begin_s
    for process in processes:
        process.communicate()
    return elapsed_s


if __name__ == "__main__":
    main()
