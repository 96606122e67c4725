"""Processes to trace: libraries and programs that are compiled for the tests, with real probes on them."""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from stallscope.capture.probes import elf, operations
from stallscope.capture.probes.operations import Hook
from stallscope.capture.probes.optional_programs import FEATURES, SERVING
from stallscope.capture.probes.program import OBJECT, Options, Program
from stallscope.events.layout import Array

ARM_HEADERS = Path(os.environ.get("ARM_HEADERS", "/usr/aarch64-linux-gnu/include"))
_HAS_NCCL = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
_WANTED = {"test_real_nccl.py": _HAS_NCCL, "test_arm64.py": (ARM_HEADERS / "asm/unistd.h").exists()}

collect_ignore = [name for name, is_there in _WANTED.items() if not is_there]
"""The real libnccl is 300 MB: tried where nvidia-nccl-cu13 is installed. The programs for arm64 are built where its
headers are (linux-libc-dev-arm64-cross).
"""

TARGETS = Path(__file__).parent / "targets"

_PUPPET = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]
P, Z = ctypes.c_void_p, ctypes.c_size_t
def comm(made): return ctypes.c_void_p(made.value)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


@dataclass
class Puppet:
    """A process with the library loaded that runs Python lines as the test sends them."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def does(self, *lines: str) -> None:
        """Run the lines, and wait for their end."""
        for line in lines:
            self.tell(line)
            assert self.process.stdout is not None
            assert self.process.stdout.readline() == "done\n", f"failed: {line}"

    def tell(self, line: str) -> None:
        """Run the lines without waiting for their end."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@dataclass(frozen=True)
class Run:
    """The output of a program, and its trace."""

    pid: int
    lines: list[list[str]]
    arrivals: Array
    events: Array
    losses: dict[str, int]


@pytest.fixture(scope="session")
def bpf_object(repository: Path) -> Path:
    """The built object."""
    subprocess.run(["make", "--silent", "-C", str(repository / "bpf")], check=True)
    return OBJECT


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """built(name): the program targets/name.c, linked with the library that is traced."""
    folder = tmp_path_factory.mktemp("targets")
    compile_ = ["gcc", "-O1", "-Wno-unused-parameter"]
    subprocess.run(
        [*compile_, "-shared", "-fPIC", "-o", folder / "libnccl.so", TARGETS / "calls.c"], check=True
    )

    def program(name: str) -> Path:
        path = folder / name
        if not path.exists():
            link = [f"-L{folder}", "-lnccl", "-lpthread", f"-Wl,-rpath,{folder}"]
            subprocess.run([*compile_, "-o", path, TARGETS / f"{name}.c", *link], check=True)
        return path

    return program


@pytest.fixture(scope="session")
def library(built: Callable[[str], Path]) -> Path:
    """The library that is traced."""
    return built("busy").parent / "libnccl.so"


@pytest.fixture(scope="session")
def hooks(library: Path) -> list[Hook]:
    """Where its functions are."""
    with elf.open_image(library) as image:
        exported = elf.exported_functions(image, operations.names())
    return operations.hooks({name: symbol.offset for name, symbol in exported.items()})


@pytest.fixture
def tracing(bpf_object: Path, library: Path, hooks: list[Hook]) -> Iterator[Callable[..., Program]]:
    """tracing(**options): the kernel side, attached to the library; only: to these functions of it.

    Without the programs that record requests of inference engines: verifying them takes more time than the others.
    """
    loaded: list[Program] = []
    features = tuple(each for each in FEATURES if SERVING not in each.alternatives)

    def trace(*, only: tuple[str, ...] = (), **options: object) -> Program:
        program = Program.load(Options(**{"features": features} | options))  # type: ignore[arg-type]
        loaded.append(program)
        program.attach(str(library), [hook for hook in hooks if not only or hook.symbol in only])
        return program

    yield trace
    for program in loaded:
        program.close()


@pytest.fixture
def puppet(library: Path) -> Iterator[Puppet]:
    """A process that waits for commands."""
    with subprocess.Popen(
        [sys.executable, "-c", _PUPPET, str(library)], stdin=-1, stdout=-1, text=True
    ) as process:
        yield Puppet(process)
        process.kill()


@pytest.fixture
def run(built: Callable[[str], Path]) -> Callable[..., Run]:
    """run(program, name, *arguments): a compiled program from start to end; returns its output as words."""

    def to_its_end(program: Program, name: str, *arguments: str) -> Run:
        printed: list[str] = []
        arrivals, events = [program.arrivals.drain()], [program.events.drain()]
        with subprocess.Popen([built(name), *arguments], stdout=-1, text=True) as process:
            assert process.stdout is not None
            reader = threading.Thread(target=lambda: printed.append(process.stdout.read()))
            reader.start()
            while process.poll() is None:
                time.sleep(0.05)
                arrivals.append(program.arrivals.drain())
                events.append(program.events.drain())
            reader.join()
        assert process.returncode == 0
        arrivals.append(program.arrivals.drain())
        events.append(program.events.drain())
        lines = [line.split() for line in printed[0].splitlines()]
        rows = np.concatenate(arrivals)
        return Run(
            process.pid, lines, rows[rows["pid"] == process.pid], np.concatenate(events), program.losses()
        )

    return to_its_end
