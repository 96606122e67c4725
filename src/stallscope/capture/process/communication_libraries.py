"""The communication libraries of a process: by its mapped files, and by its threads for gloo.

PyTorch contains gloo, so no file shows its use; since PyTorch 2.5 the threads of its gloo backend have a name. A
library that is loaded is not necessarily used: PyTorch loads NCCL in every process that uses a GPU.
"""

import re
from itertools import islice
from pathlib import Path

from stallscope.capture.process.process_identity import small_file

_FILES = {
    "nccl": re.compile(rb"libnccl(?:-[0-9a-f]+)?\.so"),
    "rccl": re.compile(rb"librccl(?:-[0-9a-f]+)?\.so"),
    "open_mpi": re.compile(rb"libmpi\.so\.(?:[2-9]\d)|libopen-pal\.so|libopen-rte\.so"),
    "cray_mpich": re.compile(rb"libmpi_(?:cray|gnu|intel|nvidia|amd)\w*\.so"),
    "intel_mpi": re.compile(rb"(?:impi|intel|oneapi)[^\n]*/libmpi\.so\.12"),
    "mpich": re.compile(rb"libmpi(?:ch)?\.so\.(?:1\d|0)(?!\d)"),
    "ucx": re.compile(rb"libucp(?:-[0-9a-f]+)?\.so"),
    "ucc": re.compile(rb"libucc(?:-[0-9a-f]+)?\.so"),
    "gloo": re.compile(rb"libgloo(?:-[0-9a-f]+)?\.so"),
    "nvshmem": re.compile(rb"libnvshmem_host\.so"),
}
"""The name of each library by its files. MPICH and the libraries with its binary interface have number 12, Open MPI 40
and above.
"""
_RELATIVES = ("intel_mpi", "cray_mpich")
_MAPPED = re.compile(rb"^\S+ [r-][w-]x[ps] \S+ \S+ \d+ +(/.+)$", re.MULTILINE)
_GLOO_THREADS = (b"pt_gloo",)
_MAX_THREADS = 512


def communication_libraries(process_dir: Path) -> tuple[str, ...]:
    """The names of the libraries, in a fixed order; empty if the process has ended.

    process_dir: its folder in /proc.
    """
    try:
        maps = (process_dir / "maps").read_bytes()
    except OSError:
        return ()
    files = b"\n".join(dict.fromkeys(_MAPPED.findall(maps)))
    found = {name for name, pattern in _FILES.items() if pattern.search(files)}
    if found.intersection(_RELATIVES):
        found.discard("mpich")
    if "gloo" not in found and _has_gloo_threads(process_dir):
        found.add("gloo")
    return tuple(name for name in _FILES if name in found)


def _has_gloo_threads(process_dir: Path) -> bool:
    try:
        threads = list(islice((process_dir / "task").iterdir(), _MAX_THREADS))
    except OSError:
        return False
    return any(small_file(f"{thread}/comm").startswith(_GLOO_THREADS) for thread in threads)
