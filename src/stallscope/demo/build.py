"""Compiles the emulated libraries, once for each version of their sources, into the user's cache folder."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from stallscope.errors import NotFound, StallscopeError, StorageFailed

SOURCES = Path(__file__).parent / "emulated"
SHIPPED = SOURCES / "lib"
"""The libraries in a wheel, by architecture and sources: a machine without a compiler can run the job."""

_OLDEST_GLIBC = (2, 34)
"""The shipped libraries need pthread functions in libc itself."""

_FLAGS = ("-shared", "-fPIC", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden")
_PROLOGUE = ("-O0", "-fno-omit-frame-pointer", "-fcf-protection=none")
"""Every function begins with `push`, as in NVIDIA's libraries: the cheap case for a uprobe. Optimised leaves do not."""

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "libcudart.so.12": ("device.c", "memory.c", "copy.c", "event.c", "graph.c", "cudart.c"),
    "libnccl.so.2": ("nccl.c", "communicators.c", "group.c", "collective.c", "profiler.c", "meet.c"),
}
"""In build order: the second library is linked against the first."""


def cache_folder() -> Path:
    """The folder of built libraries: $XDG_CACHE_HOME/stallscope, otherwise /var/cache for root and ~/.cache for others.

    Never another user's folder, as $HOME under sudo may be: the libraries are loaded into processes.
    """
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "stallscope"
    return (Path("/var/cache") if os.geteuid() == 0 else Path.home() / ".cache") / "stallscope"


def build(cache: Path | None = None) -> Path:
    """The folder that holds libcudart.so.12 and libnccl.so.2: shipped in the wheel, or built now if they are missing.

    Raises NotFound without a C compiler, StorageFailed when the cache cannot be written, StallscopeError when
    compiling fails.
    """
    if cache is None and _is_usable(shipped_folder()):
        return shipped_folder()
    folder = (cache or cache_folder()) / f"emulated-{_fingerprint()}"
    try:
        if _is_ours(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError as error:
        raise StorageFailed(
            f"cannot store the emulated GPU libraries in {folder.parent}: {error.strerror}; set XDG_CACHE_HOME"
        ) from error
    try:
        for name, sources in LIBRARIES.items():
            _compile(_compiler(), scratch, name, sources)
        _put(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def shipped_folder() -> Path:
    """The folder for this machine in a wheel; libraries of other sources are in another folder."""
    return SHIPPED / f"{os.uname().machine}-{_fingerprint()}"


def _is_usable(folder: Path) -> bool:
    """Whether the libraries are there and this machine's C library is GNU's, and new enough for them.

    They are not loaded to find out: the agent would count this process among the GPU processes.
    """
    try:
        version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()[-1].split(".")
    except (ValueError, OSError, IndexError):
        return False
    is_new = tuple(int(part) for part in version[:2]) >= _OLDEST_GLIBC
    return is_new and all((folder / name).is_file() for name in LIBRARIES)


def _put(scratch: Path, folder: Path) -> None:
    """Rename the folder into place, all or nothing: of two concurrent builds, the first is used."""
    try:
        scratch.rename(folder)
    except OSError as error:
        if not _is_ours(folder):
            raise StorageFailed(f"{folder} is not a folder of this user: remove it") from error


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and folder.stat().st_uid == os.geteuid()


def _fingerprint() -> str:
    digest = hashlib.sha256(repr((_FLAGS, _PROLOGUE, sorted(LIBRARIES.items()))).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    for name in (os.environ.get("CC"), "gcc", "cc"):
        if name and shutil.which(name):
            return name
    raise NotFound("no C compiler was found to build the emulated GPU libraries: install gcc and libc6-dev")


def _compile(compiler: str, folder: Path, name: str, sources: tuple[str, ...]) -> None:
    others = [f"-l:{other}" for other in LIBRARIES if (folder / other).exists()]
    command = [
        compiler,
        *_FLAGS,
        *_PROLOGUE,
        f"-ffile-prefix-map={SOURCES}=emulated",
        f"-Wl,-soname,{name}",
        "-Wl,--build-id=sha1",
        "-Wl,-rpath,$ORIGIN",
        "-o",
        str(folder / name),
        *sources,
        f"-L{folder}",
        *others,
        "-lpthread",
        "-lrt",
    ]
    # In the folder of the sources, so that two builds give equal files.
    done = subprocess.run(command, capture_output=True, text=True, cwd=SOURCES)
    if done.returncode:
        raise StallscopeError(f"{compiler} cannot build {name}: {_first_complaint(done.stderr)}")


def _first_complaint(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if "error" in line]
    return lines[0] if lines else "no message"
