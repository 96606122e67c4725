"""Compiles the emulated libraries, once for each state of their sources, into the user's cache folder."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from stallscope.errors import NotFound, StallscopeError

SOURCES = Path(__file__).parent / "emulated"

_FLAGS = ("-shared", "-fPIC", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden")
_PROLOGUE = ("-O0", "-fno-omit-frame-pointer", "-fcf-protection=none")
"""Every function begins with `push`, as NVIDIA's do: the cheap way for a uprobe. Optimised leaves do not."""

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "libcudart.so.12": ("device.c", "memory.c", "copy.c", "event.c", "graph.c", "cudart.c"),
    "libnccl.so.2": ("nccl.c", "communicators.c", "group.c", "collective.c", "meet.c"),
}
"""In the order of building: the second is linked against the first."""


def cache_folder() -> Path:
    """Where built libraries are kept: $XDG_CACHE_HOME/stallscope, else ~/.cache/stallscope."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stallscope"


def build(cache: Path | None = None) -> Path:
    """The folder that holds libcudart.so.12 and libnccl.so.2, built now if they are not there yet.

    Raises NotFound without a C compiler, StallscopeError when it fails.
    """
    folder = (cache or cache_folder()) / f"emulated-{_fingerprint()}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        for name, sources in LIBRARIES.items():
            _compile(_compiler(), Path(scratch), name, sources)
        # A rename is all or nothing, so two builders at a time do no harm.
        built = Path(scratch).rename(folder) if not folder.exists() else folder
        Path(scratch).mkdir(exist_ok=True)
    return built


def _fingerprint() -> str:
    digest = hashlib.sha256(repr((_FLAGS, _PROLOGUE, sorted(LIBRARIES.items()))).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    for name in (os.environ.get("CC"), "gcc", "cc"):
        if name and shutil.which(name):
            return name
    raise NotFound("no C compiler to build the emulated GPU libraries with: install gcc and libc6-dev")


def _compile(compiler: str, folder: Path, name: str, sources: tuple[str, ...]) -> None:
    others = [f"-l:{other}" for other in LIBRARIES if (folder / other).exists()]
    command = [
        compiler,
        *_FLAGS,
        *_PROLOGUE,
        f"-Wl,-soname,{name}",
        "-Wl,--build-id=sha1",
        "-Wl,-rpath,$ORIGIN",
        "-o",
        str(folder / name),
        *(str(SOURCES / source) for source in sources),
        f"-L{folder}",
        *others,
        "-lpthread",
        "-lrt",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StallscopeError(f"{compiler} cannot build {name}: {_first_complaint(done.stderr)}")


def _first_complaint(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if "error" in line]
    return lines[0] if lines else "no message"
