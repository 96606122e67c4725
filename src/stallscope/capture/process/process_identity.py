"""The identity of a process in its job: rank, local rank, world size, name, GPU.

From the environment that the launcher set (torchrun, Slurm, Open MPI, MPICH and relatives) and from the kernel's view
of the process. Variables that a process sets after its start are not visible; unknown is -1. The GPU is known if the
process can use only one GPU.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.process.visible_devices import GpuNumbers, visible_gpus
from stallscope.events.layout import UNKNOWN

_MAX_ENVIRON_BYTES = 1 << 20
_SMALL_FILE_BYTES = 1 << 14
_DEVICE = re.compile(r"/dev/nvidia(\d+)")


class _Launcher(NamedTuple):
    """The variables in which a launcher passes rank, local rank and world size."""

    name: str
    rank: str
    local_rank: str
    nranks: str


_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Launcher("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    _Launcher("MPICH, Intel MPI", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    _Launcher("PALS, Cray MPICH", "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_SIZE"),
    _Launcher("PMIx", "PMIX_RANK", "PMIX_LOCAL_RANK", "PMIX_SIZE"),
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)
"""First match wins: torchrun and MPI run inside a Slurm step, whose own numbers then describe the launcher."""


@dataclass(frozen=True)
class Identity:
    """The position of a process in its job; -1 where it cannot be known."""

    pid: int
    rank: int = UNKNOWN
    local_rank: int = UNKNOWN
    nranks: int = UNKNOWN
    device: int = UNKNOWN
    comm: str = ""
    started_ticks: int = UNKNOWN
    is_from_nccl: bool = False  # rank and nranks refer to a communicator


def identity(
    pid: int,
    proc: Path = Path("/proc"),
    *,
    variables: Mapping[str, str] | None = None,
    gpus: GpuNumbers = GpuNumbers(),
) -> Identity:
    """The identity of `pid`. If a process has ended or may not be read, only its pid is known.

    variables: its environment; None: it is read. gpus: the numbers of the machine's GPUs.
    """
    process_dir = proc / str(pid)
    variables = environment(process_dir) if variables is None else variables
    rank, local_rank, nranks = launcher_ranks(variables)
    comm, start_ticks = _comm_and_start(process_dir)
    return Identity(pid, rank, local_rank, nranks, _device(process_dir, variables, gpus), comm, start_ticks)


def environment(process_dir: Path) -> dict[str, str]:
    """The environment a process (its folder in /proc) was started with."""
    try:
        with (process_dir / "environ").open("rb") as file:
            environ = file.read(_MAX_ENVIRON_BYTES)
    except OSError:
        return {}
    pairs = (variable.partition(b"=") for variable in environ.split(b"\0") if b"=" in variable)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def launcher_ranks(variables: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, local rank, number of ranks) from the first launcher that sets a rank."""
    for launcher in _LAUNCHERS:
        rank = _number(variables.get(launcher.rank))
        nranks = _number(variables.get(launcher.nranks))
        if rank != UNKNOWN and (nranks == UNKNOWN or rank < nranks):
            return rank, _number(variables.get(launcher.local_rank)), nranks
    return UNKNOWN, UNKNOWN, UNKNOWN


def _number(text: str | None) -> int:
    is_number = text is not None and len(text) <= 7 and text.isascii() and text.isdigit()
    return int(text) if text is not None and is_number else UNKNOWN


def small_file(path: str, n_bytes: int = _SMALL_FILE_BYTES) -> bytes:
    """The content of a kernel file, up to a number of bytes; empty if the file does not exist.

    For files that are read each second: pathlib and buffers cost more than the kernel's part of the read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, n_bytes)
    except OSError:
        return b""
    finally:
        os.close(fd)


def large_file(path: Path, n_bytes: int) -> bytes:
    """The content of a kernel file of many pages, of which a read returns one; empty if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(n_bytes)
    except OSError:
        return b""


def stat_fields(task: str) -> list[bytes]:
    """The fields of a process or thread from its state on; empty if it has ended. task: its folder in /proc."""
    return fields_of_stat(small_file(f"{task}/stat"))


def parent_pid(pid: int, proc: Path) -> int:
    """The parent of a process; 0 if the process has ended."""
    fields = stat_fields(f"{proc}/{pid}")
    return int(fields[1]) if len(fields) > 1 else 0


def fields_of_stat(text: bytes) -> list[bytes]:
    """The fields of a stat file from the state on, after the name, which may contain blanks and brackets.

    proc(5): 0 state, 1 parent, 7 minor and 9 major page faults, 11 and 12 CPU time in ticks, 17 threads, 19 start in
    ticks since boot; 10, 13 and 14 are of ended children that the process has waited for.
    """
    return text.rpartition(b")")[2].split()


def _comm_and_start(process_dir: Path) -> tuple[str, int]:
    """Command name and start time in clock ticks since boot, from /proc/PID/stat."""
    try:
        text = (process_dir / "stat").read_bytes()
    except OSError:
        return "", UNKNOWN
    name = text.partition(b"(")[2].rpartition(b")")[0]
    return name.decode("utf-8", "replace"), int(fields_of_stat(text)[19])


def _device(process_dir: Path, variables: Mapping[str, str], gpus: GpuNumbers) -> int:
    """The only GPU that the process has opened, otherwise the only GPU that is visible to it."""
    devices = {
        gpus.of_file(int(match[1])) for match in map(_DEVICE.fullmatch, open_files(process_dir)) if match
    }
    if len(devices) == 1:
        return devices.pop()
    gpu_numbers = visible_gpus(process_dir, variables, gpus)
    return gpu_numbers[0] if len(gpu_numbers) == 1 and (gpu_numbers[0] in devices or not devices) else UNKNOWN


def open_files(process_dir: Path) -> list[str]:
    """The targets of the descriptors of a process (its folder in /proc); empty where they may not be read."""
    try:
        links = list((process_dir / "fd").iterdir())
    except OSError:
        return []
    return [_target(link) for link in links]


def open_sockets(process_dir: Path) -> set[int]:
    """The numbers (inodes) of the sockets that a process (its folder in /proc) has open."""
    targets = open_files(process_dir)
    return {int(target[8:-1]) for target in targets if target.startswith("socket:[")}


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
